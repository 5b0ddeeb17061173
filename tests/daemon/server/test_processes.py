"""The daemon as a process, on the fake model and as `emberd serve`: signals, drains, restarts."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

FAKE = str(Path(__file__).with_name("serve_fake.py"))
IPV6 = Path("/proc/net/if_inet6")
Launch = Callable[..., AbstractAsyncContextManager[tuple[Process, str]]]


@asynccontextmanager
async def _running(*command: str) -> AsyncIterator[tuple[Process, str]]:
    """A process that says on its first line where it listens."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, stdout=PIPE, stderr=PIPE
    )
    assert process.stdout is not None
    try:
        yield process, (await process.stdout.readline()).decode().split()[-1]
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.fixture(params=["fake", "core"])
def launch(request: pytest.FixtureRequest, tmp_path: Path) -> Launch:
    """Starts daemons with so many seconds to drain."""
    if request.param == "fake":
        return lambda drain: _running(FAKE, "0.002", str(drain))
    artifact = request.getfixturevalue("demo_artifact")

    def start(
        drain: float, port: int = 0, host: str = "127.0.0.1"
    ) -> AbstractAsyncContextManager[tuple[Process, str]]:
        config = tmp_path / "emberd.yaml"
        settings = {"drain_seconds": drain, "port": port, "host": host, "threads": 1}
        config.write_text(json.dumps(settings))  # JSON is YAML
        command = ("-m", "emberd.daemon.cli", "serve", str(artifact), "--config", str(config))
        return _running(*command)

    return start


async def _ask(http: aiohttp.ClientSession, url: str, n: int, max_tokens: int) -> Any:
    """A streamed answer that only its limit ends, of which the first line was read."""
    messages = [{"role": "user", "content": "x"}]
    body = {"messages": messages, "max_tokens": max_tokens, "n": n, "ignore_eos": True}
    response = await http.post(f"{url}/v1/chat/completions", json=body | {"stream": True})
    assert response.status == 200, await response.text()
    await response.content.readline()
    return response


async def _events(response: Any) -> list[Any]:
    lines = (await response.read()).decode().splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


async def test_sigterm_finishes_what_runs_and_exits_0(launch: Launch) -> None:
    async with launch(30) as (process, url), aiohttp.ClientSession() as http:
        response = await _ask(http, url, 4, 150)
        process.send_signal(signal.SIGTERM)
        choices = [event["choices"][0] for event in await _events(response)]
        assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["length"] * 4
        assert await process.wait() == 0


async def test_the_drain_has_a_limit(launch: Launch) -> None:
    async with launch(0.1) as (process, url), aiohttp.ClientSession() as http:
        response = await _ask(http, url, 16, 3900)
        process.send_signal(signal.SIGTERM)
        *_, last = await _events(response)
        assert last["error"]["message"] == "the daemon is shutting down"
        assert await asyncio.wait_for(process.wait(), 10) == 0


async def test_a_second_signal_exits_at_once(launch: Launch) -> None:
    async with launch(60) as (process, url), aiohttp.ClientSession() as http:
        await _ask(http, url, 16, 3900)
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(10):
            while True:
                try:
                    async with http.get(f"{url}/health") as health:
                        if (await health.json())["status"] == "draining":
                            break
                except aiohttp.ClientConnectionError:
                    break  # no longer listening: it drains
        process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(process.wait(), 10) == 130


@pytest.mark.parametrize("launch", ["core"], indirect=True)
async def test_a_killed_daemon_starts_again_on_its_port(launch: Launch) -> None:
    async with aiohttp.ClientSession() as http:
        async with launch(1) as (process, url):
            response = await _ask(http, url, 16, 3900)
            process.kill()
            with pytest.raises(aiohttp.ClientError):
                await response.read()
            await process.wait()
        async with launch(1, int(url.rsplit(":", 1)[1])) as (process, again):
            assert again == url
            events = await _events(await _ask(http, url, 1, 5))
            assert events[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("launch", ["core"], indirect=True)
async def test_the_log_tells_of_drains_and_not_of_malformed_requests(launch: Launch) -> None:
    async with launch(1) as (process, url):
        host, port = url.removeprefix("http://").split(":")
        for data in (b"GET / HTTP/9.9\r\n\r\n", b"GET / HTTP/1.1\r\nX: " + b"x" * 99_999):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(data)
            assert b" 400 " in await reader.readline()
            writer.close()
        process.terminate()
        _, errors = await process.communicate()
        assert errors == b"emberd: shutting down, with 0 requests to finish\n"


@pytest.mark.skipif(not IPV6.exists() or " lo\n" not in IPV6.read_text(), reason="no IPv6 here")
@pytest.mark.parametrize("launch", ["core"], indirect=True)
async def test_an_ipv6_address_makes_a_url(launch: Launch) -> None:
    async with launch(1, host="::1") as (_, url), aiohttp.ClientSession() as http:
        assert url.startswith("http://[::1]:")
        async with http.get(f"{url}/health") as response:
            assert response.status == 200
