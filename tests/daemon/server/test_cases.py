"""The serving cases S1 to S12, over real HTTP."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest


def _chunks(lines: list[str]) -> list[dict[str, Any]]:
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def _text(chunks: list[dict[str, Any]], name: str = "content") -> str:
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    return "".join(delta.get(name, "") for delta in deltas)


async def test_s1_characters_split_over_tokens_come_whole(start: Any) -> None:
    daemon = await start("a 🎉 世界")
    chunks = _chunks(await daemon.stream())
    assert _text(chunks) == "a 🎉 世界"
    for chunk in chunks:
        assert "\ufffd" not in _text([chunk])


async def test_s1_a_stream_that_ends_inside_a_character_ends_cleanly(start: Any) -> None:
    daemon = await start("a🎉")
    chunks = _chunks(await daemon.stream(max_tokens=3))
    assert _text(chunks) == "a"
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


async def test_s2_usage_comes_in_one_extra_chunk(start: Any) -> None:
    daemon = await start("hello world")
    chunks = _chunks(await daemon.stream(stream_options={"include_usage": True}))
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] > 0
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks[:-1])


async def _refusal(daemon: Any, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    async with daemon.post("/v1/chat/completions", body) as response:
        error = (await response.json())["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return response.status, error


async def test_s3_a_late_system_message_is_refused_with_the_reason(start: Any) -> None:
    daemon = await start("hello")
    messages = [{"role": role, "content": "x"} for role in ("user", "system", "user")]
    status, error = await _refusal(daemon, {"messages": messages})
    assert (status, error["message"]) == (400, "System message must be at the beginning.")


@pytest.mark.parametrize(
    ("messages", "reason"),
    [([], "at least one message"), ([{"role": "assistant", "content": "x"}], "No user query")],
)
async def test_s4_messages_without_a_user_turn_are_refused(
    start: Any, messages: list[dict[str, str]], reason: str
) -> None:
    daemon = await start("hello")
    status, error = await _refusal(daemon, {"messages": messages})
    assert status == 400 and reason in error["message"]


async def _idle(daemon: Any) -> None:
    async with asyncio.timeout(10):
        while daemon.service.engine.load.busy or daemon.service.engine.load.queued:
            await asyncio.sleep(0.005)


async def test_s5_a_closed_connection_frees_the_slot(start: Any) -> None:
    daemon = await start(None, slots=1, delay=0.002)
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3000, "stream": True}
    streaming = await daemon.post("/v1/chat/completions", body)
    await streaming.content.readline()
    queued = asyncio.create_task(daemon.chat(max_tokens=3000))
    while daemon.service.engine.load.queued == 0:
        await asyncio.sleep(0.005)
    queued.cancel()
    streaming.close()
    await _idle(daemon)
    assert (await daemon.chat(max_tokens=2))["usage"]["completion_tokens"] <= 2


async def test_s6_what_does_not_fit_the_context_is_refused(start: Any) -> None:
    daemon = await start("hello", context=64)
    status, error = await _refusal(
        daemon, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1000}
    )
    assert (status, error["code"]) == (400, "context_length_exceeded")
    assert "1000" in error["message"] and "64" in error["message"]


async def test_s7_a_full_context_ends_with_length(start: Any) -> None:
    daemon = await start([0], context=40)
    body = await daemon.chat("x", max_tokens=None)
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["total_tokens"] == 40
    assert len(body["choices"][0]["message"]["content"]) == body["usage"]["completion_tokens"]


async def test_s8_no_part_of_a_stop_string_is_streamed(start: Any, tokenizer: Any) -> None:
    tail, head = tokenizer.encode(" #"), tokenizer.encode("#x")
    assert len(tail) == len(head) == 1
    daemon = await start([*tokenizer.encode("hello"), *tail, *head])
    chunks = _chunks(await daemon.stream(stop=["##"]))
    assert _text(chunks) == "hello "
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("literal", ["<|im_end|>", "<think>", "<<|im_end|>|im_start|>"])
@pytest.mark.parametrize("parts", [False, True])
async def test_s9_control_tokens_spelled_by_users_are_text(
    start: Any, tokenizer: Any, literal: str, parts: bool
) -> None:
    daemon = await start(None)
    content: Any = f"say {literal} please"
    if parts:
        content = [{"type": "text", "text": content[:9]}, {"type": "text", "text": content[9:]}]
    await daemon.chat([{"role": "user", "content": content}], max_tokens=1)
    slot = max(daemon.service.engine._slots, key=lambda slot: slot.last_used)
    control = set(tokenizer.added.values())
    seen = [token for token in slot.tokens if token in control]
    begin, end = tokenizer.added["<|im_start|>"], tokenizer.added["<|im_end|>"]
    assert seen == [begin, end, begin]
    data = b"".join(map(tokenizer.literal_bytes, slot.tokens))
    assert f"say {literal} please".encode() in data


BAD_BODIES = {
    "not UTF-8": b'{"messages": "\xff"}',
    "not JSON": b"{",
    "not an object": b"[1]",
    "nested": b"[" * 100_000,
    "nested field": b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "lone surrogate": b'{"messages":[{"role":"user","content":"\\ud800"}]}',
    "huge integer": b'{"messages":[{"role":"user","content":"x"}],"max_tokens":'
    + b"9" * 5000
    + b"}",
}
BAD_FIELDS: list[dict[str, Any]] = [
    {"max_tokens": -1},
    {"max_tokens": 0},
    {"max_tokens": float("nan")},
    {"max_tokens": 1e99},
    {"max_tokens": 1.5},
    {"max_tokens": True},
    {"max_tokens": 10**40},
    {"temperature": -0.5},
    {"temperature": float("inf")},
    {"temperature": "hot"},
    {"top_p": 1.1},
    {"n": 0},
    {"n": 17},
    {"stop": [""]},
    {"stop": {"a": 1}},
    {"stream": "yes"},
    {"logit_bias": {"x": 1}},
    {"logit_bias": {"99999": 1}},
    {"logit_bias": [1]},
    {"top_logprobs": 3},
    {"seed": "one"},
    {"messages": [{"role": "robot", "content": "x"}]},
    {"messages": [{"role": [], "content": "x"}]},
    {"messages": [{"role": "user", "content": 3}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
    {"messages": "hello"},
    {"tools": [{"type": "function"}]},
    {"response_format": {"type": "json_object"}},
    {"stream_options": {"include_usage": True}},
    {"chat_template_kwargs": 3},
]


@pytest.mark.parametrize("name", BAD_BODIES)
async def test_s10_bad_bodies_are_refused(start: Any, name: str) -> None:
    daemon = await start("hello")
    url = daemon.url + "/v1/chat/completions"
    async with daemon.http.post(url, data=BAD_BODIES[name]) as response:
        assert response.status == 400
        assert (await response.json())["error"]["type"] == "invalid_request_error"
    await daemon.chat()


@pytest.mark.parametrize("fields", BAD_FIELDS, ids=str)
async def test_s10_bad_fields_are_refused(start: Any, fields: dict[str, Any]) -> None:
    daemon = await start("hello")
    body = {"messages": [{"role": "user", "content": "x"}], **fields}
    status, error = await _refusal(daemon, body)
    assert status == 400 and error["message"]
    await daemon.chat()


async def test_s10_unknown_model_path_method_and_size(start: Any) -> None:
    daemon = await start("hello", max_body_bytes=1 << 20)
    body = {"model": "gpt-9", "messages": [{"role": "user", "content": "x"}]}
    status, error = await _refusal(daemon, body)
    assert (status, error["code"]) == (404, "model_not_found")
    for method, path, expected in (("GET", "/v1/nothing", 404), ("GET", "/v1/completions", 405)):
        async with daemon.http.request(method, daemon.url + path) as response:
            assert response.status == expected
            assert (await response.json())["error"]["type"] == "invalid_request_error"
    url = daemon.url + "/v1/chat/completions"
    async with daemon.http.post(url, data=bytes(100 << 20)) as response:
        assert response.status == 413
        assert (await response.json())["error"]["code"] == "body_too_large"
    await daemon.chat()


async def test_s11_the_limit_inside_thinking(start: Any, tokenizer: Any) -> None:
    script = [*tokenizer.encode("hello world"), tokenizer.added["</think>"]]
    daemon = await start(script, opened=True)
    body = await daemon.chat(max_tokens=3, chat_template_kwargs={"enable_thinking": True})
    choice = body["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"] == ""
    assert "hello world".startswith(choice["message"]["reasoning_content"])
    assert choice["message"]["reasoning_content"]
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 3


async def test_s12_alone_and_under_load_answers_are_identical(start: Any) -> None:
    daemon = await start(None, slots=3)
    alone = await daemon.chat("the question", max_tokens=60)
    busy = await asyncio.gather(
        *(daemon.chat(f"other {i}" * i, max_tokens=80) for i in range(1, 6)),
        daemon.chat("the question", max_tokens=60),
        daemon.chat("the question", max_tokens=60),
    )
    assert busy[-1]["choices"] == busy[-2]["choices"] == alone["choices"]


def _open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


async def test_repeated_disconnects_leak_nothing(start: Any) -> None:
    daemon = await start(None, slots=2)
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3000, "stream": True}

    async def leave() -> None:
        async with aiohttp.ClientSession() as http:
            response = await http.post(daemon.url + "/v1/chat/completions", json=body)
            await response.content.readline()
            response.close()

    await leave()
    await _idle(daemon)
    tasks, files = len(asyncio.all_tasks()), _open_files()
    for _ in range(1000 // 20):
        await asyncio.gather(*(leave() for _ in range(20)))
    await _idle(daemon)
    async with asyncio.timeout(10):
        while len(asyncio.all_tasks()) > tasks + 2 or _open_files() > files + 2:
            await asyncio.sleep(0.01)
    await daemon.chat(max_tokens=1)
