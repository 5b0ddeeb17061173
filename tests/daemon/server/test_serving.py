"""Prefix reuse, queueing, failures, thinking, health and metrics, over real HTTP."""

from __future__ import annotations

import asyncio
import json
from typing import Any


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def test_a_conversation_prefills_only_what_is_new(start: Any) -> None:
    daemon, fresh = await start(None), await start(None)
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


async def test_changed_history_answers_as_a_fresh_run(start: Any) -> None:
    daemon, fresh = await start(None, slots=1), await start(None)
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
    async with asyncio.timeout(10):
        while daemon.service.engine.load.busy < 1:
            await asyncio.sleep(0.005)
        waiting.append(asyncio.create_task(daemon.chat()))
        while daemon.service.engine.load.queued < 1:
            await asyncio.sleep(0.005)
    async with daemon.post("/v1/chat/completions", {"messages": [_user("x")]}) as response:
        assert response.status == 429
        assert (await response.json())["error"]["code"] == "queue_full"
    daemon.model.gate.set()
    answers = await asyncio.gather(*waiting)
    assert {a["choices"][0]["message"]["content"] for a in answers} == {"hello"}


async def test_a_failing_step_fails_its_request_alone(start: Any, tokenizer: Any) -> None:
    (poison,) = tokenizer.encode("~")
    daemon = await start("hello", slots=1, poison=poison)
    async with daemon.post("/v1/chat/completions", {"messages": [_user("a ~")]}) as response:
        error = (await response.json())["error"]
        assert (response.status, error["type"]) == (500, "server_error")
        assert "expert 3 of layer 1" in error["message"]
    lines = await daemon.stream("a ~")
    assert "expert 3 of layer 1" in json.loads(lines[-1])["error"]["message"]
    assert (await daemon.chat("a"))["choices"][0]["message"]["content"] == "hello"


async def test_thinking_is_told_from_the_answer(start: Any) -> None:
    daemon = await start("hello\n\n</think>\n\nworld", opened=True)
    fields: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": True}}
    message = (await daemon.chat(**fields))["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hello", "world")
    chunks = [json.loads(line) for line in (await daemon.stream(**fields))[:-1]]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "hello"
    assert "".join(delta.get("content", "") for delta in deltas) == "world"


async def test_health_and_metrics(start: Any) -> None:
    daemon = await start("hello world", slots=3, max_queue=5)
    await daemon.chat()
    async with daemon.http.get(daemon.url + "/health") as response:
        health = await response.json()
    assert health["status"] == "ok" and health["slots"]["total"] == 3
    assert health["queue"] == {"length": 0, "limit": 5}
    async with daemon.http.get(daemon.url + "/metrics") as response:
        assert response.content_type == "text/plain"
        lines = (await response.text()).splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert values['emberd_http_responses_total{code="200"}'] == "2"
    assert int(values["emberd_generated_tokens_total"]) > 1
    assert values["emberd_time_to_first_token_seconds_count"] == "1"
    assert int(values["process_resident_memory_bytes"]) > 1 << 20


async def test_draining_refuses_new_requests(start: Any) -> None:
    daemon = await start("hello")
    daemon.service.draining = True
    async with daemon.post("/v1/chat/completions", {"messages": [_user("x")]}) as response:
        assert response.status == 503
        assert (await response.json())["error"]["code"] == "draining"
