"""A daemon over a fake model, on a real port."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from aiohttp import ClientSession
from aiohttp.test_utils import TestServer
from emberd.compile.tokenizer import compile_tokenizer
from emberd.daemon.config import Config
from emberd.daemon.engine import Engine, Load
from emberd.daemon.server.app import make_app
from emberd.daemon.server.keys import Serving
from emberd.daemon.server.service import Service, load_service
from emberd.daemon.template import ChatTemplate
from emberd.daemon.text import Tokenizer

HOOKS = ("prompt_begins", "prompt_read", "at_rest")  # of the engine


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
    return Tokenizer(compile_tokenizer(fake.tokenizer_json()))


@dataclass
class Daemon:
    """A running daemon and a client's session."""

    service: Service
    model: Any
    url: str
    http: ClientSession

    @property
    def endless(self) -> dict[str, Any]:
        """Fields of a request whose answer only its limit ends."""
        return {"logit_bias": {str(token): -100 for token in self.service.stop_tokens}}

    def post(self, path: str, body: dict[str, Any]) -> Any:
        return self.http.post(self.url + path, json=body)

    async def chat(self, text: str | list[dict[str, Any]] = "hello", **fields: Any) -> Any:
        """The JSON of a chat completion that must succeed."""
        async with self.post("/v1/chat/completions", chat_body(text, **fields)) as response:
            body = await response.json()
            assert response.status == 200, body
            return body

    async def stream(self, text: str | list[dict[str, Any]] = "hello", **fields: Any) -> list[Any]:
        """The JSON of each chunk of a streamed chat completion that must succeed."""
        body = chat_body(text, stream=True, **fields)
        async with self.post("/v1/chat/completions", body) as response:
            assert response.status == 200, await response.text()
            lines = (await response.read()).decode().splitlines()
        data = [line.removeprefix("data: ") for line in lines if line]
        assert data[-1] == "[DONE]" or "error" in json.loads(data[-1])
        return [json.loads(line) for line in data if line != "[DONE]"]

    async def refusal(self, body: dict[str, Any], path: str = "/v1/chat/completions") -> Any:
        """The status and OpenAI's error object of a request that must fail."""
        async with self.post(path, body) as response:
            error = (await response.json())["error"]
            assert set(error) == {"message", "type", "param", "code"}
            return response.status, error

    async def until(self, condition: Callable[[Load], bool]) -> None:
        """Wait until the engine's load is so."""
        async with asyncio.timeout(30):
            while not condition(self.service.engine.load):
                await asyncio.sleep(0.002)

    async def idle(self) -> None:
        await self.until(lambda load: not load.busy and not load.queued)


def chat_body(text: str | list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}] if isinstance(text, str) else text
    return {"messages": messages, "temperature": 0, "max_tokens": 20, **fields}


Start = Callable[..., Awaitable[Daemon]]
Run = Callable[[Service, Any], Awaitable[Daemon]]


@pytest.fixture
async def run() -> AsyncIterator[Run]:
    """Puts a service on a port, until the test ends."""
    servers: list[TestServer] = []
    sessions: list[ClientSession] = []

    async def begin(service: Service, model: Any) -> Daemon:
        loading = asyncio.get_running_loop().create_future()
        loading.set_result(service)
        server = TestServer(make_app(Serving(service.config, service.engine.metrics, loading)))
        await server.start_server()
        servers.append(server)
        sessions.append(ClientSession())
        return Daemon(service, model, str(server.make_url("")).rstrip("/"), sessions[-1])

    yield begin
    for session in sessions:
        await session.close()
    for server in servers:
        await server.close()


def _config(settings: dict[str, Any]) -> Config:
    names = Config.__dataclass_fields__
    return Config(**{name: value for name, value in settings.items() if name in names})


@pytest.fixture
def every_boundary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Snapshots are taken also where they save few tokens, as those of tests are."""
    monkeypatch.setattr("emberd.daemon.job.LEAST_SAVED", 1)


@pytest.fixture
def start(tokenizer: Tokenizer, run: Run) -> Start:
    """Starts daemons. `script`: text or tokens of every answer; None for a hash of the history.

    Other arguments are settings of the fake model or of Config, or what the engine calls.
    """
    start_of_turn = tokenizer.encode_with_control("<|im_start|>assistant\n")
    thinking = tokenizer.encode_with_control("<think>\n")
    end = tokenizer.added["<|im_end|>"]

    async def begin(script: str | list[int] | None = None, **settings: Any) -> Daemon:
        opened = settings.get("opened", False)  # every prompt ends in an open thinking

        def prompt_end(history: list[int]) -> int:
            size = len(start_of_turn)
            found = [
                i + size
                for i in range(len(history) - size + 1)
                if history[i : i + size] == start_of_turn
            ]
            return (found[-1] if found else 1) + len(thinking) * opened

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
        config = _config(settings)
        engine = Engine(
            lambda: model,
            tokenizer,
            slots=config.slots,
            context=config.context or None,
            max_queue=config.max_queue,
            keep_alive=config.keep_alive,
            **{name: settings[name] for name in HOOKS if name in settings},
        )
        service = Service(
            name="tiny",
            engine=engine,
            tokenizer=tokenizer,
            template=ChatTemplate(fake.TEMPLATE, {"enable_thinking": "yes"} if opened else {}),
            stop_tokens=frozenset({end, tokenizer.added["<|endoftext|>"]}),
            config=config,
        )
        return await run(service, model)

    return begin


@pytest.fixture(params=["fake", "core"])
def serve(request: pytest.FixtureRequest, start: Start, run: Run) -> Start:
    """Starts daemons on the fake model, and on the embedded one through the native core.

    Arguments are settings of Config.
    """
    if request.param == "fake":
        return start
    artifact = request.getfixturevalue("demo_artifact")

    async def begin(**settings: Any) -> Daemon:
        return await run(load_service(artifact, _config({"threads": 1, **settings})), None)

    return begin
