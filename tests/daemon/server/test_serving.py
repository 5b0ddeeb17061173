"""Prefix reuse, queueing, failures, thinking and health, over real HTTP."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@pytest.mark.usefixtures("every_boundary")
async def test_a_conversation_prefills_only_what_is_new(serve: Any) -> None:
    daemon, fresh = await serve(), await serve()
    history = [_user("first question")]
    first = await daemon.chat(history)
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    history += [{"role": "assistant", "content": "an answer of another wording"}, _user("second")]
    second = await daemon.chat(history)
    turns = daemon.service.tokenizer.encode_with_control(
        "<|im_start|>user\nfirst question<|im_end|>\n"
    )
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == len(turns)
    assert second["choices"] == (await fresh.chat(history))["choices"]


async def test_a_continued_answer_is_reused_as_it_stands(start: Any) -> None:
    daemon = await start("hello world")
    history = [_user("first")]
    first = await daemon.chat(history)
    history += [first["choices"][0]["message"], _user("second")]
    second = await daemon.chat(history)
    usage = first["usage"]
    expected = usage["prompt_tokens"] + usage["completion_tokens"] - 1  # all but the stop token
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == expected


async def test_changed_history_answers_as_a_fresh_run(serve: Any) -> None:
    daemon, fresh = await serve(slots=1), await serve()
    for words in (["a", "b", "c"], ["a", "x", "c"], ["a", "b", "c"], ["z"], ["a", "b", "d", "e"]):
        history = [m for w in words for m in (_user(w * 9), {"role": "assistant", "content": w})]
        history.append(_user("go"))
        expected = await fresh.chat(history, n=2, seed=3, temperature=1)
        got = await daemon.chat(history, n=2, seed=3, temperature=1)
        assert got["choices"] == expected["choices"]


async def test_more_than_the_queue_holds_is_refused(start: Any) -> None:
    daemon = await start("hello", slots=1, max_queue=1)
    daemon.model.gate.clear()
    waiting = [asyncio.create_task(daemon.chat())]
    await daemon.until(lambda load: load.busy)
    waiting.append(asyncio.create_task(daemon.chat()))
    await daemon.until(lambda load: load.queued)
    status, error = await daemon.refusal({"messages": [_user("x")]})
    assert (status, error["code"]) == (429, "queue_full")
    daemon.model.gate.set()
    answers = await asyncio.gather(*waiting)
    assert {a["choices"][0]["message"]["content"] for a in answers} == {"hello"}


async def test_a_failing_step_fails_its_request_alone(start: Any, tokenizer: Any) -> None:
    (poison,) = tokenizer.encode("~")
    daemon = await start("hello", slots=1, poison=poison)
    status, error = await daemon.refusal({"messages": [_user("a ~")]})
    assert (status, error["type"]) == (500, "server_error")
    assert "expert 3 of layer 1" in error["message"]
    chunks = await daemon.stream("a ~")
    assert "expert 3 of layer 1" in chunks[-1]["error"]["message"]
    assert (await daemon.chat("a"))["choices"][0]["message"]["content"] == "hello"


async def test_thinking_is_told_from_the_answer(start: Any) -> None:
    daemon = await start("hello\n\n</think>\n\nworld", opened=True)
    fields: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": True}}
    message = (await daemon.chat(**fields))["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hello", "world")
    deltas = [chunk["choices"][0]["delta"] for chunk in await daemon.stream(**fields)]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "hello"
    assert "".join(delta.get("content", "") for delta in deltas) == "world"


async def test_health(start: Any) -> None:
    daemon = await start("hello world", slots=3, max_queue=5)
    await daemon.chat()
    async with daemon.http.get(daemon.url + "/health") as response:
        health = await response.json()
    assert health["status"] == "ok" and health["slots"]["total"] == 3
    assert health["queue"] == {"length": 0, "limit": 5}


async def test_draining_refuses_new_requests(start: Any) -> None:
    daemon = await start("hello")
    daemon.service.draining = True
    body = {"messages": [_user("x")]}
    async with daemon.http.post(f"{daemon.url}/v1/chat/completions", json=body) as response:
        assert response.status == 503 and response.headers["Connection"] == "close"
        assert (await response.json())["error"]["code"] == "draining"


@pytest.mark.usefixtures("every_boundary")
async def test_an_unforeseen_error_fails_its_request_alone(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = await start(None, slots=1)
    conversation = [_user("a"), {"role": "assistant", "content": "b"}, _user("c")]
    expected = await daemon.chat(conversation)
    session = type(daemon.service.engine._slots[0].session)
    for method in ("restore", "snapshot", "step"):
        with monkeypatch.context() as broken:
            broken.delattr(session, method)
            status, error = await daemon.refusal({"messages": conversation, "temperature": 0})
            assert status == 500 and method in error["message"]
        assert (await daemon.chat(conversation))["choices"] == expected["choices"]
    assert daemon.service.engine.metrics.requests["failed"] == 3


async def test_logits_that_are_no_numbers_are_an_error(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = await start(None)
    session = type(daemon.service.engine._slots[0].session)
    size = daemon.service.engine.vocab_size
    monkeypatch.setattr(session, "_values", lambda self, history: [math.nan] * size)
    for fields in ({"temperature": 0}, {"temperature": 1}, {"logprobs": True}):
        status, error = await daemon.refusal({"messages": [_user("x")], **fields})
        assert status == 500 and "no finite logits" in error["message"]


async def test_a_batch_whose_later_prompt_is_too_long_says_so(start: Any) -> None:
    daemon = await start(None, context=64)
    body = {"prompt": ["x", "x" * 100], "max_tokens": 5}
    status, error = await daemon.refusal(body, "/v1/completions")
    assert (status, error["code"]) == (400, "context_length_exceeded")
    async with daemon.post("/v1/completions", body | {"stream": True}) as response:
        assert response.status == 400
    assert daemon.model.steps == []
