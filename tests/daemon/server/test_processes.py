"""The daemon and the terminal client as processes: signals, drains, pipes."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from asyncio.subprocess import PIPE, STDOUT, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

SERVE = str(Path(__file__).with_name("serve_fake.py"))


@asynccontextmanager
async def _serving(delay: float, drain: float) -> AsyncIterator[tuple[Process, str]]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, SERVE, str(delay), str(drain), stdout=PIPE
    )
    assert process.stdout is not None
    try:
        line = (await process.stdout.readline()).decode()
        yield process, line.split()[-1]
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def _body(max_tokens: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": "x"}]
    return {"messages": messages, "max_tokens": max_tokens, "stream": True}


async def test_sigterm_finishes_what_runs_and_exits_0() -> None:
    async with _serving(0.01, 30) as (process, url), aiohttp.ClientSession() as http:
        response = await http.post(f"{url}/v1/chat/completions", json=_body(60))
        await response.content.readline()
        process.send_signal(signal.SIGTERM)
        text = (await response.read()).decode()
        chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        assert text.rstrip().endswith("data: [DONE]")
        assert await process.wait() == 0


async def test_the_drain_has_a_limit() -> None:
    async with _serving(0.01, 0.1) as (process, url), aiohttp.ClientSession() as http:
        response = await http.post(f"{url}/v1/chat/completions", json=_body(4000))
        await response.content.readline()
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 10) == 0


async def test_a_second_signal_exits_at_once() -> None:
    async with _serving(0.01, 60) as (process, url), aiohttp.ClientSession() as http:
        response = await http.post(f"{url}/v1/chat/completions", json=_body(4000))
        await response.content.readline()
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


async def _chat(url: str) -> Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "emberd.daemon.cli", "chat", "--url", url),
        stdin=PIPE,
        stdout=PIPE,
        stderr=STDOUT,
    )


async def test_chat_works_when_piped(start: Any) -> None:
    daemon = await start("hello world")
    process = await _chat(daemon.url)
    output, _ = await process.communicate(b"first\n\n/reset\nsecond\n/exit\nthird\n")
    assert output.decode().splitlines() == ["hello world", "hello world"]
    assert process.returncode == 0


async def test_ctrl_c_stops_the_answer_and_not_the_program(start: Any) -> None:
    daemon = await start([0], delay=0.005)
    process = await _chat(daemon.url)
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(b"tell me everything\n")
    assert await process.stdout.readexactly(3)
    process.send_signal(signal.SIGINT)
    process.stdin.write(b"/help\n")
    process.stdin.close()
    rest = (await process.stdout.read()).decode()
    assert "/reset" in rest
    assert await process.wait() == 0
    async with asyncio.timeout(10):
        while daemon.service.engine.load.busy:
            await asyncio.sleep(0.01)


async def test_chat_without_a_daemon_says_how_to_start_one() -> None:
    process = await _chat("http://127.0.0.1:9")
    output, _ = await process.communicate(b"")
    assert process.returncode == 2
    assert "emberd serve" in output.decode() and len(output.decode().splitlines()) == 1
