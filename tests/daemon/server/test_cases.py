"""The serving cases S1 to S12, over real HTTP: on a fake model, and on a real one through the core.

Where a case needs a certain answer, `start` scripts it; the others hold for any model.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest


def _text(chunks: list[Any], name: str = "content") -> str:
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    return "".join(delta.get(name, "") for delta in deltas)


def _bytes(chunks: list[Any]) -> bytes:
    """Those of the tokens that the chunks report."""
    reports = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"]]
    entries = [entry for report in reports if report for entry in report["content"]]
    return b"".join(bytes(entry["bytes"]) for entry in entries)


async def test_s1_characters_split_over_tokens_come_whole(start: Any) -> None:
    daemon = await start("a 🎉 世界")
    chunks = await daemon.stream()
    assert _text(chunks) == "a 🎉 世界"
    for chunk in chunks:
        assert "\ufffd" not in _text([chunk])


async def test_s1_a_stream_that_ends_inside_a_character_ends_cleanly(start: Any) -> None:
    daemon = await start("a🎉")
    chunks = await daemon.stream(max_tokens=3)
    assert _text(chunks) == "a"
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


async def test_s1_pieces_of_characters_in_any_order(serve: Any) -> None:
    """The model is held to the parts of one character and draws them at random."""
    daemon = await serve()
    parts = daemon.service.tokenizer.encode("龘")
    assert len(parts) > 1
    fields = {"logit_bias": dict.fromkeys(map(str, parts), 100), "frequency_penalty": 2}
    drawn = {"temperature": 2, "seed": 4, "max_tokens": 120, "logprobs": True}
    chunks = await daemon.stream(**fields, **drawn)
    text = _text(chunks)
    assert text == _bytes(chunks).decode("utf-8", "ignore") and "龘" in text
    assert all("\ufffd" not in _text([chunk]) for chunk in chunks)
    begun = await daemon.stream(logit_bias={str(parts[0]): 100}, max_tokens=1)
    assert _text(begun) == "" and begun[-1]["choices"][0]["finish_reason"] == "length"


async def test_s2_usage_comes_in_one_extra_chunk(serve: Any) -> None:
    daemon = await serve()
    chunks = await daemon.stream(stream_options={"include_usage": True}, n=2)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] > 0
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks[:-1])
    assert all("usage" not in chunk for chunk in await daemon.stream())


async def test_s3_a_late_system_message_is_refused_with_the_reason(serve: Any) -> None:
    daemon = await serve()
    messages = [{"role": role, "content": "x"} for role in ("user", "system", "user")]
    status, error = await daemon.refusal({"messages": messages})
    assert (status, error["message"]) == (400, "System message must be at the beginning.")


@pytest.mark.parametrize(
    ("messages", "reason"),
    [([], "at least one message"), ([{"role": "assistant", "content": "x"}], "No user query")],
)
async def test_s4_messages_without_a_user_turn_are_refused(
    serve: Any, messages: list[dict[str, str]], reason: str
) -> None:
    daemon = await serve()
    status, error = await daemon.refusal({"messages": messages})
    assert status == 400 and reason in error["message"]


async def test_s5_a_closed_connection_frees_the_slot(serve: Any) -> None:
    daemon = await serve(slots=1)
    long = {"max_tokens": 3000, "n": 16, **daemon.endless}
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True, **long}
    streaming = await daemon.post("/v1/chat/completions", body)
    await streaming.content.readline()
    queued = asyncio.create_task(daemon.chat(**long))
    await daemon.until(lambda load: load.queued)
    queued.cancel()
    streaming.close()
    await daemon.idle()
    assert daemon.service.engine.metrics.requests["cancelled"] == 2
    assert (await daemon.chat(max_tokens=2))["usage"]["completion_tokens"] <= 2


@pytest.mark.parametrize("words", [1, 300, 300_000])
async def test_s6_what_does_not_fit_the_context_is_refused(serve: Any, words: int) -> None:
    daemon = await serve(context=64)
    status, error = await daemon.refusal(
        {"messages": [{"role": "user", "content": " x" * words}], "max_tokens": 1000}
    )
    assert (status, error["code"]) == (400, "context_length_exceeded")
    assert "1000" in error["message"] and "64" in error["message"]
    assert (await daemon.chat("x", max_tokens=1))["usage"]["completion_tokens"] == 1


async def test_s7_a_full_context_ends_with_length(serve: Any) -> None:
    daemon = await serve(context=50)
    chunks = await daemon.stream("x", max_tokens=None, logprobs=True, **daemon.endless)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    whole = await daemon.chat("x", max_tokens=None, **daemon.endless)
    assert whole["usage"]["total_tokens"] == 50
    assert whole["choices"][0]["message"]["content"] == _text(chunks) != ""


async def test_s8_no_part_of_a_stop_string_is_streamed(start: Any, tokenizer: Any) -> None:
    tail, head = tokenizer.encode(" #"), tokenizer.encode("#x")
    assert len(tail) == len(head) == 1
    daemon = await start([*tokenizer.encode("hello"), *tail, *head])
    chunks = await daemon.stream(stop=["##"])
    assert _text(chunks) == "hello "
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


async def test_s8_a_stop_string_ends_the_answer_wherever_tokens_begin(serve: Any) -> None:
    daemon = await serve()
    fields = {"max_tokens": 40, **daemon.endless}
    whole = (await daemon.chat(logprobs=True, **fields))["choices"][0]
    text, tokens = whole["message"]["content"], whole["logprobs"]["content"]
    stops = [text[start : start + 3] for start in range(1, len(text) - 3, 2)]
    assert any(all(stop not in token["token"] for token in tokens) for stop in stops)
    for stop in stops:
        chunks = await daemon.stream(stop=["never", stop], **fields)
        assert _text(chunks) == text[: text.index(stop)]
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("literal", ["<|im_end|>", "<think>", "<<|im_end|>|im_start|>"])
@pytest.mark.parametrize("parts", [False, True])
async def test_s9_control_tokens_spelled_by_users_are_text(
    serve: Any, literal: str, parts: bool
) -> None:
    daemon = await serve()
    tokenizer = daemon.service.tokenizer

    async def prompt(content: Any) -> tuple[bytes, list[int]]:
        """What the model was given: the text, and the control tokens in it."""
        await daemon.chat([{"role": "user", "content": content}], max_tokens=1)
        slot = max(daemon.service.engine._slots, key=lambda slot: slot.last_used)
        control = set(tokenizer.added.values())
        data = b"".join(map(tokenizer.literal_bytes, slot.tokens))
        return data, [token for token in slot.tokens if token in control]

    said = f"say {literal} please"
    content = [{"type": "text", "text": part} for part in (said[:9], said[9:])] if parts else said
    data, control = await prompt(content)
    assert said.encode() in data
    assert control == (await prompt("say nothing please"))[1]


BAD_BODIES = {
    "not UTF-8": b'{"messages": "\xff"}',
    "not JSON": b"{",
    "not an object": b"[1]",
    "nested": b"[" * 100_000,
    "nested field": b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "nested variable": b'{"messages":[{"role":"user","content":"x"}],"chat_template_kwargs":{"x":'
    + b"[" * 700
    + b"]" * 700
    + b"}}",
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
    {"max_completion_tokens": 0},
    {"max_completion_tokens": "9"},
    {"max_tokens": 10**40},
    {"temperature": -0.5},
    {"temperature": float("inf")},
    {"temperature": "hot"},
    {"temperature": float("nan")},
    {"temperature": 2.1},
    {"top_k": -2},
    {"top_k": 1e300},
    {"min_p": float("-inf")},
    {"presence_penalty": 3},
    {"frequency_penalty": float("nan")},
    {"top_p": 1.1},
    {"n": 0},
    {"n": 17},
    {"n": 10**18},
    {"n": 1.5},
    {"stop": [""]},
    {"stop": {"a": 1}},
    {"stop": ["x"] * 100_000},
    {"stop": "x" * 100_000},
    {"stop": [1]},
    {"stream": "yes"},
    {"logit_bias": {"x": 1}},
    {"logit_bias": {"99999": 1}},
    {"logit_bias": [1]},
    {"logit_bias": {"1": 101}},
    {"logit_bias": dict.fromkeys(map(str, range(2000)), 1)},
    {"logit_bias": {"-1": 1}},
    {"logit_bias": {"1": "much"}},
    {"top_logprobs": 3},
    {"seed": "one"},
    {"seed": 2**64},
    {"seed": -(2**63) - 1},
    {"messages": [{"role": "robot", "content": "x"}]},
    {"messages": [{"role": [], "content": "x"}]},
    {"messages": [{"role": "user", "content": 3}]},
    {"messages": [{"role": "user"}]},
    {"messages": [{"role": "user", "content": None}]},
    {"messages": [{"content": "x"}]},
    {"messages": ["x"]},
    {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
    {"messages": "hello"},
    {"messages": None},
    {"messages": {}},
    {"model": 5},
    {"tools": [{"type": "function"}]},
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_schema", "json_schema": {}}},
    {"response_format": "text"},
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


async def test_s10_bad_fields_are_refused(serve: Any) -> None:
    daemon = await serve()
    for fields in BAD_FIELDS:
        body = {"messages": [{"role": "user", "content": "x"}], **fields}
        status, error = await daemon.refusal(body)
        assert status == 400 and len(error["message"]) < 300, fields
        assert error["type"] == "invalid_request_error"
    await daemon.chat()


async def test_s10_unknown_model_path_method_and_size(serve: Any) -> None:
    daemon = await serve(max_body_bytes=1 << 20)
    body = {"model": "gpt-9", "messages": [{"role": "user", "content": "x"}]}
    status, error = await daemon.refusal(body)
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


async def test_s11_the_limit_inside_thinking(serve: Any) -> None:
    daemon = await serve()
    close = daemon.service.tokenizer.think_close
    bias = {"logit_bias": {str(close): -100, **daemon.endless["logit_bias"]}}
    body = await daemon.chat(
        max_tokens=9, chat_template_kwargs={"enable_thinking": True}, seed=2, temperature=1, **bias
    )
    choice = body["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"] == ""
    assert choice["message"]["reasoning_content"]
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 9


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.5, "seed": 11, "n": 2}], ids=str)
async def test_s12_alone_and_under_load_answers_are_identical(
    serve: Any, sampling: dict[str, Any]
) -> None:
    daemon = await serve(slots=3)
    fields = {"max_tokens": 60, "logprobs": True, **daemon.endless, **sampling}
    alone = await daemon.chat("the question", **fields)
    busy = await asyncio.gather(
        *(daemon.chat(f"other {i}" * i, max_tokens=80, **daemon.endless) for i in range(1, 6)),
        daemon.chat("the question", **fields),
        daemon.chat("the question", **fields),
    )
    assert busy[-1]["choices"] == busy[-2]["choices"] == alone["choices"]
