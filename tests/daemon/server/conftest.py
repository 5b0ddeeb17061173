"""A daemon over a fake model, on a real port."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from aiohttp import ClientResponse, ClientSession
from aiohttp.test_utils import TestServer
from emberd.daemon.config import Config
from emberd.daemon.engine import Engine
from emberd.daemon.server.app import make_app
from emberd.daemon.server.keys import Service
from emberd.daemon.template import ChatTemplate
from emberd.daemon.text import Tokenizer


def _fake_model() -> ModuleType:
    path = Path(__file__).with_name("fake_model.py")
    spec = importlib.util.spec_from_file_location("fake_model", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fake_model"] = module
    spec.loader.exec_module(module)
    return module


fake = _fake_model()


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer(fake.tokenizer_json())


@dataclass
class Daemon:
    """A running daemon and a client's session."""

    service: Service
    model: Any
    url: str
    http: ClientSession

    def post(self, path: str, body: dict[str, Any]) -> Any:
        return self.http.post(self.url + path, json=body)

    async def chat(self, text: str | list[dict[str, Any]] = "hello", **fields: Any) -> Any:
        """The JSON of a chat completion that must succeed."""
        async with self.post("/v1/chat/completions", chat_body(text, **fields)) as response:
            body = await response.json()
            assert response.status == 200, body
            return body

    async def stream(self, text: str | list[dict[str, Any]] = "hello", **fields: Any) -> list[str]:
        """The data lines of a streamed chat completion."""
        body = chat_body(text, stream=True, **fields)
        async with self.post("/v1/chat/completions", body) as response:
            assert response.status == 200, await response.text()
            return await data_lines(response)


async def data_lines(response: ClientResponse) -> list[str]:
    lines = (await response.read()).decode().splitlines()
    return [line.removeprefix("data: ") for line in lines if line]


def chat_body(text: str | list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}] if isinstance(text, str) else text
    return {"messages": messages, "temperature": 0, "max_tokens": 20, **fields}


Start = Callable[..., Awaitable[Daemon]]


@pytest.fixture
async def start(tokenizer: Tokenizer) -> AsyncIterator[Start]:
    """Starts daemons. `script`: text or tokens of every answer; None for a hash of the history.

    Other arguments are settings of the fake model or of Config.
    """
    servers: list[TestServer] = []
    sessions: list[ClientSession] = []

    async def begin(script: str | list[int] | None = None, **settings: Any) -> Daemon:
        end = tokenizer.added["<|im_end|>"]
        start_of_turn = tokenizer.encode_with_control("<|im_start|>assistant\n")

        def prompt_end(history: list[int]) -> int:
            size = len(start_of_turn)
            found = [
                i + size
                for i in range(len(history) - size + 1)
                if history[i : i + size] == start_of_turn
            ]
            position = found[-1] if found else 1
            opened = tokenizer.encode_with_control("<think>\n")
            skip = opened if settings.get("opened") else []
            return position + len(skip)

        tokens = (
            [*tokenizer.encode_with_control(script), end] if isinstance(script, str) else script
        )
        model_names = ("delay", "poison", "max_context")
        model = fake.FakeModel(
            vocab_size=max(tokenizer.added.values()) + 1,
            script=tokens,
            prompt_end=prompt_end,
            **{name: settings[name] for name in model_names if name in settings},
        )
        names = Config.__dataclass_fields__
        config = Config(**{name: value for name, value in settings.items() if name in names})
        engine = Engine(
            model,
            tokenizer,
            slots=config.slots,
            context=config.context or model.max_context,
            max_queue=config.max_queue,
        )
        service = Service(
            name="tiny",
            engine=engine,
            tokenizer=tokenizer,
            template=ChatTemplate(fake.TEMPLATE, {}),
            stop_tokens=frozenset({end, tokenizer.added["<|endoftext|>"]}),
            config=config,
        )
        server = TestServer(make_app(service))
        await server.start_server()
        servers.append(server)
        sessions.append(ClientSession())
        return Daemon(service, model, str(server.make_url("")).rstrip("/"), sessions[-1])

    yield begin
    for session in sessions:
        await session.close()
    for server in servers:
        await server.close()
