"""Clients that break, stall, vanish or lie: nothing leaks, and everybody else is served."""

from __future__ import annotations

import asyncio
import gc
import json
import zlib
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from emberd.daemon.metrics import open_files, resident_bytes
from emberd.daemon.server import body as body_module

LONG = {"max_tokens": 3000, "n": 16}


def _host(daemon: Any) -> tuple[str, int]:
    host, port = daemon.url.removeprefix("http://").split(":")
    return host, int(port)


async def _raw(daemon: Any, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection on which these bytes were sent."""
    reader, writer = await asyncio.open_connection(*_host(daemon))
    writer.write(data)
    await writer.drain()
    return reader, writer


def _post(body: bytes, length: int | None = None) -> bytes:
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {}\r\n\r\n"
    return head.format(len(body) if length is None else length).encode() + body


async def test_bodies_that_never_end_hold_no_slot(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = await serve(slots=1)
    monkeypatch.setattr(body_module, "BODY_SECONDS", 1.0)
    slow = [await _raw(daemon, _post(b'{"messages":', 5000)) for _ in range(100)]
    assert (await daemon.chat(max_tokens=3))["usage"]["completion_tokens"] <= 3
    for reader, writer in slow:
        assert b" 408 " in await reader.readline()
        head, _, _ = (await reader.readuntil(b"\r\n\r\n")).partition(b"\r\n\r\n")
        assert b"application/json" in head
        writer.close()
    await daemon.idle()
    assert daemon.service.engine.metrics.responses[408] == 100


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /health HTTP/1.1\r\nX: " + b"x" * 100_000 + b"\r\n\r\n",
        b"GET /" + b"%ff" * 1000 + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        _post(b""),
        _post(b"\xff\xfe{}"),
    ],
    ids=["TLS", "version", "length", "chunk", "header", "path", "empty", "UTF-16"],
)
async def test_what_is_no_request_is_refused(start: Any, data: bytes) -> None:
    daemon = await start("hello")
    reader, writer = await _raw(daemon, data)
    status = (await reader.readline()).split()[1]
    assert status in (b"400", b"404", b"505")
    writer.close()
    await daemon.chat()


async def test_a_compressed_body_is_as_large_as_what_it_unpacks_to(start: Any) -> None:
    daemon = await start("hello")
    packer = zlib.compressobj()
    data = b"".join(packer.compress(bytes(1 << 20)) for _ in range(200)) + packer.flush()
    before = resident_bytes()
    async with daemon.http.post(
        f"{daemon.url}/v1/chat/completions", data=data, headers={"Content-Encoding": "deflate"}
    ) as response:
        assert response.status == 413
    assert resident_bytes() - before < 64 << 20


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_a_body_that_is_not_compressed_as_it_says(start: Any, encoding: str) -> None:
    daemon = await start("hello")
    async with daemon.http.post(
        f"{daemon.url}/v1/chat/completions",
        data=b'{"messages": []}',
        headers={"Content-Encoding": encoding},
    ) as response:
        error = (await response.json())["error"]
        assert (response.status, error["type"]) == (400, "invalid_request_error")
        assert "not encoded as Content-Encoding" in error["message"]
    await daemon.chat()


async def test_a_client_that_leaves_while_its_prompt_is_read(start: Any) -> None:
    daemon = await start(None, slots=1, max_context=100_000)
    daemon.model.gate.clear()
    body = {"messages": [{"role": "user", "content": "x " * 20_000}]}
    waiting = asyncio.create_task(daemon.http.post(f"{daemon.url}/v1/chat/completions", json=body))
    await daemon.until(lambda load: load.busy)
    waiting.cancel()
    while not daemon.service.engine._jobs[0].stream.cancelled:
        await asyncio.sleep(0.002)
    daemon.model.gate.set()
    await daemon.idle()
    assert len(daemon.model.steps) == 1
    assert daemon.service.engine.metrics.requests["cancelled"] == 1


async def _leave(daemon: Any, when: int) -> None:
    """Ask and hang up: before the answer, after its head, or in the middle of it."""
    body = {"messages": [{"role": "user", "content": f"x {when}"}], "stream": True, **LONG}
    body |= daemon.endless
    async with aiohttp.ClientSession() as http:
        asking = asyncio.create_task(http.post(f"{daemon.url}/v1/chat/completions", json=body))
        if when % 3 == 0:
            await asyncio.sleep(0.001 * (when % 7))
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            return
        response = await asking
        if response.status == 200 and when % 3 == 1:
            await response.content.readline()
        response.close()


async def test_five_hundred_aborted_requests_leave_nothing(serve: Any) -> None:
    daemon = await serve(slots=2, max_queue=64)

    async def crowd(start: int, count: int) -> None:
        for first in range(start, start + count, 25):
            await asyncio.gather(*(_leave(daemon, number) for number in range(first, first + 25)))
        await daemon.idle()

    await crowd(0, 50)
    gc.collect()
    tasks, files, memory = len(asyncio.all_tasks()), open_files(), resident_bytes()
    await crowd(50, 500)
    async with asyncio.timeout(20):
        while len(asyncio.all_tasks()) > tasks or open_files() > files:
            await asyncio.sleep(0.01)
    gc.collect()
    assert resident_bytes() - memory < 16 << 20
    assert len(list(Path("/proc/self/task").iterdir())) < 64
    assert (await daemon.chat(max_tokens=1))["usage"]["completion_tokens"] == 1


async def test_those_who_stay_get_their_own_answers(serve: Any) -> None:
    daemon = await serve(slots=2, max_queue=100)

    async def ask(number: int) -> str:
        fields = {"max_tokens": 20, "temperature": 1, "seed": number, **daemon.endless}
        chunks = await daemon.stream(f"question {number}", **fields)
        return "".join(c["choices"][0]["delta"].get("content", "") for c in chunks)

    alone = [await ask(number) for number in range(10)]
    together = await asyncio.gather(
        *(ask(number) for number in range(10)), *(_leave(daemon, number) for number in range(40))
    )
    assert list(together[:10]) == alone


@pytest.mark.parametrize("seed", [-(2**63), 2**63 - 1, 2**64 - 1, 0, -1])
async def test_seeds_of_any_size_repeat(serve: Any, seed: int) -> None:
    daemon = await serve()
    fields = {"seed": seed, "temperature": 2, "max_tokens": 16, **daemon.endless}
    first = await daemon.chat(**fields)
    assert (await daemon.chat(**fields))["choices"] == first["choices"]


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 5e-324},
        {"temperature": 1e-30, "top_p": 1e-300},
        {"temperature": 2, "top_p": 0},
        {"temperature": 2, "min_p": 1},
        {"temperature": 2, "top_k": 1},
        {"temperature": 2, "top_k": -1, "top_p": 0.999999},
        {"temperature": 0, "presence_penalty": -2, "frequency_penalty": -2},
        {"temperature": 0.0, "logit_bias": {"5": 100, "6": -100}},
    ],
    ids=json.dumps,
)
async def test_extreme_sampling_still_answers(serve: Any, sampling: dict[str, Any]) -> None:
    daemon = await serve()
    body = await daemon.chat(max_tokens=8, seed=1, logprobs=True, top_logprobs=3, **sampling)
    assert 1 <= body["usage"]["completion_tokens"] <= 8
    for entry in body["choices"][0]["logprobs"]["content"]:
        assert entry["logprob"] <= 0


async def test_unknown_fields_are_ignored(serve: Any) -> None:
    """As by llama-server, and so those that are misspelt, whatever they hold."""
    daemon = await serve()
    misspelt = {"max_token": 1, "temprature": "hot", "stops": ["e"], "n_choices": 0}
    plain = await daemon.chat("hello", max_tokens=20)
    other = await daemon.chat("hello", max_tokens=20, **misspelt)
    assert other["choices"] == plain["choices"]


async def test_empty_messages_are_messages(serve: Any) -> None:
    daemon = await serve()
    for content in ("", [], [{"type": "text", "text": ""}], " "):
        messages = [{"role": "user", "content": content}]
        assert (await daemon.chat(messages, max_tokens=2))["usage"]["prompt_tokens"] > 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello " * 900_000}]}),
        ("/v1/completions", {"prompt": "hello " * 900_000}),
    ],
)
async def test_prompts_of_megabytes_are_refused_before_they_are_tokenised(
    serve: Any, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    daemon = await serve()

    def encode(text: str) -> None:
        raise AssertionError(f"{len(text)} characters were tokenised")

    monkeypatch.setattr(daemon.service.tokenizer._recent, "encode", encode)
    status, error = await daemon.refusal(body, path)
    assert (status, error["code"]) == (400, "context_length_exceeded")
    assert "characters, which make at least" in error["message"]
    assert daemon.service.engine.metrics.requests["refused"] == 1
