"""Starting: nothing is imported that the first token does not need, and requests that come while
the model is being loaded wait for it.
"""

from __future__ import annotations

import asyncio
import re
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp.test_utils import TestServer
from emberd.daemon.config import Config
from emberd.daemon.errors import EmberdError
from emberd.daemon.metrics import Metrics
from emberd.daemon.server.app import make_app
from emberd.daemon.server.keys import Serving

IMPORT = re.compile(r"import time: .*\| +(\S+)")
CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
NEEDLESS = {"emberd.compile", "numpy", "onnx", "_ssl", "tokenizers", "torch", "tvm", "yaml"}


async def test_the_first_token_needs_neither_numpy_nor_openssl(demo_artifact: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-X", "importtime", "-m", "emberd.daemon.cli"),
        *("serve", str(demo_artifact), "--port", "0"),
        stdout=PIPE,
        stderr=PIPE,
    )
    assert process.stdout is not None
    imported: set[str] = set()

    async def read_imports() -> None:
        assert process.stderr is not None
        async for line in process.stderr:
            if match := IMPORT.match(line.decode()):
                imported.add(match[1])

    reading = asyncio.create_task(read_imports())
    url = (await process.stdout.readline()).decode().split()[-1]
    ask = aiohttp.request("POST", f"{url}/v1/chat/completions", json=CHAT)
    async with ask as response:
        assert response.status == 200
    maps = Path(f"/proc/{process.pid}/maps").read_text()
    process.terminate()
    await reading
    assert await process.wait() == 0
    assert "emberd.daemon.engine" in imported
    assert imported & NEEDLESS == set()
    assert "_core" in maps and "libcrypto" not in maps and "libssl" not in maps


@pytest.mark.parametrize(
    ("settings", "log"),
    [
        ("{}", b"the configuration was reloaded: nothing changed"),
        (None, b"nothing was reloaded: emberd was started without --config"),
    ],
)
async def test_a_reload_that_is_asked_for_while_starting_is_done_after(
    demo_artifact: Path, tmp_path: Path, settings: str | None, log: bytes
) -> None:
    options: list[str] = []
    if settings is not None:
        (tmp_path / "emberd.yaml").write_text(settings)
        options = ["--config", str(tmp_path / "emberd.yaml")]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "emberd.daemon.cli", "serve", str(demo_artifact), "--port", "0"),
        *options,
        stdout=PIPE,
        stderr=PIPE,
    )
    assert process.stdout is not None and process.stderr is not None
    try:
        while not _blocks_reloads(process.pid):
            await asyncio.sleep(0.001)
        process.send_signal(signal.SIGHUP)
        line = await asyncio.wait_for(process.stderr.readline(), 60)
        assert line == b"emberd: %s\n" % log
        assert b"http://" in await process.stdout.readline()
        assert not _blocks_reloads(process.pid)
    finally:
        process.terminate()
        await process.wait()


def _blocks_reloads(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    blocked = next(line for line in status if line.startswith("SigBlk:"))
    return bool(int(blocked.split()[1], 16) & 1 << signal.SIGHUP - 1)


class _Starting:
    """A server whose service is still being loaded."""

    def __init__(self, url: str, http: aiohttp.ClientSession, serving: Serving) -> None:
        self._url = url
        self._http = http
        self.loading: asyncio.Future[Any] = serving.loading

    async def get(self, path: str) -> tuple[int, str]:
        async with self._http.get(self._url + path) as response:
            return response.status, await response.text()

    async def chat(self) -> tuple[int, Any]:
        async with self._http.post(self._url + "/v1/chat/completions", json=CHAT) as response:
            return response.status, await response.json()


@pytest.fixture
async def starting() -> AsyncIterator[_Starting]:
    serving = Serving(Config(), Metrics(), asyncio.get_running_loop().create_future())
    server = TestServer(make_app(serving))
    await server.start_server()
    async with aiohttp.ClientSession() as http:
        yield _Starting(str(server.make_url("")).rstrip("/"), http, serving)
    await server.close()


async def test_requests_wait_until_the_model_is_loaded(starting: _Starting, start: Any) -> None:
    status, text = await starting.get("/health")
    assert (status, text) == (503, '{"status": "loading"}')
    status, text = await starting.get("/metrics")
    assert status == 200 and 'emberd_http_responses_total{code="503"} 1' in text
    waiting = [asyncio.create_task(starting.chat()) for _ in range(3)]
    done, _ = await asyncio.wait(waiting, timeout=0.05)
    assert not done
    starting.loading.set_result((await start("hello")).service)
    for status, body in await asyncio.gather(*waiting):
        assert status == 200 and body["choices"][0]["message"]["content"] == "hello"
    assert (await starting.get("/health"))[0] == 200


async def test_who_waited_in_vain_is_told_why(starting: _Starting) -> None:
    waiting = asyncio.create_task(starting.chat())
    await asyncio.wait([waiting], timeout=0.05)
    starting.loading.set_exception(EmberdError("weights.bin is damaged"))
    status, body = await waiting
    assert (status, body["error"]["code"]) == (503, "not_loaded")
    assert "weights.bin is damaged" in body["error"]["message"]
