"""Which step comes next: prompts in pieces between tokens, requests in the order they came."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest
from emberd.daemon.engine import SHARED_CHUNK, EngineClosed, GenerationFailed
from emberd.daemon.generation import Request
from emberd.daemon.sampling import SamplingParameters


def _request(prompt: list[int], max_tokens: int, **fields: Any) -> Request:
    sampling = SamplingParameters(temperature=0)
    return Request(prompt, max_tokens, sampling, frozenset(), **fields)


async def _consume(stream: Any) -> Any:
    async with stream:
        async for _ in stream:
            pass
    return stream.usage


async def test_a_stream_waits_for_one_chunk_at_most(start: Any) -> None:
    daemon = await start(slots=3)
    engine, model = daemon.service.engine, daemon.model
    prompts = [[1], *([number, *[5] * 900] for number in (2, 3))]
    with engine._changed:  # all are there before the first round
        streams = [engine.submit(_request(p, 200 if len(p) == 1 else 1)) for p in prompts]
    await asyncio.gather(*map(_consume, streams))
    session, _ = model.steps[0]
    between, worst, prompt_tokens = 0, 0, 0
    first, *_, last = [i for i, (at, _) in enumerate(model.steps) if at is session]
    for at, tokens in model.steps[first : last + 1]:
        between = 0 if at is session else between + tokens
        prompt_tokens += 0 if at is session else tokens
        worst = max(worst, between)
    assert worst == SHARED_CHUNK
    assert prompt_tokens > 2 * SHARED_CHUNK


async def test_a_rest_begins_when_the_last_request_ends(start: Any, tokenizer: Any) -> None:
    (poison,) = tokenizer.encode("~")
    told: list[str] = []
    names = ("prompt_begins", "prompt_read", "at_rest")
    callbacks = {name: (lambda n=name: told.append(n)) for name in names}
    daemon = await start(slots=2, poison=poison, **callbacks)
    engine = daemon.service.engine
    with engine._changed:
        streams = [engine.submit(_request([number], 5)) for number in (2, 3)]
    await asyncio.gather(*map(_consume, streams))
    assert told == [*2 * ["prompt_begins", "prompt_read"], "at_rest"]
    await _consume(engine.submit(_request([4], 1)))
    with pytest.raises(GenerationFailed):
        await _consume(engine.submit(_request([poison], 5)))
    await daemon.idle()
    assert told[5:] == 2 * ["prompt_begins", "at_rest"]
    engine.close()
    assert told[9:] == ["at_rest"]


async def test_prompts_take_turns(start: Any) -> None:
    daemon = await start(slots=2)
    engine, model = daemon.service.engine, daemon.model
    with engine._changed:
        streams = [engine.submit(_request([number, *[5] * 300], 1)) for number in (2, 3)]
    await asyncio.gather(*map(_consume, streams))
    sessions = [session for session, tokens in model.steps if tokens == 32]
    turns = [a is b for a, b in pairwise(sessions)]
    assert len(sessions) == 18 and not any(turns)


async def test_a_hundred_requests_on_two_slots_are_served_in_order(serve: Any) -> None:
    daemon = await serve(slots=2, max_queue=98)
    finished: list[int] = []

    async def ask(number: int) -> str:
        body = await daemon.chat(f"question {number}", max_tokens=5, **daemon.endless)
        finished.append(number)
        text: str = body["choices"][0]["message"]["content"]
        return text

    tasks = []
    for number in range(100):
        tasks.append(asyncio.create_task(ask(number)))
        await daemon.until(lambda load, n=number: load.busy + load.queued + len(finished) > n)
    answers = await asyncio.gather(*tasks)
    assert all(abs(number - place) <= 4 for place, number in enumerate(finished))
    assert (
        answers[17]
        == (await daemon.chat("question 17", max_tokens=5, **daemon.endless))["choices"][0][
            "message"
        ]["content"]
    )
    assert daemon.service.engine.metrics.requests["completed"] == 101


async def test_a_batch_of_prompts_keeps_its_place_in_a_full_queue(start: Any) -> None:
    daemon = await start(slots=1, max_queue=1, delay=0.001)
    batch = {"prompt": ["a", "b", "c"], "max_tokens": 5}
    first = asyncio.create_task(_completion(daemon, batch))
    await daemon.until(lambda load: load.busy)
    others = []
    while not first.done():
        if daemon.service.engine.load.queued == 0:
            others.append(asyncio.create_task(_completion(daemon, {"prompt": "d"})))
        await asyncio.sleep(0.001)
    status, body = await first
    assert status == 200 and len(body["choices"]) == 3
    assert {status for status, _ in await asyncio.gather(*others)} <= {200, 429}


async def _completion(daemon: Any, body: dict[str, Any]) -> tuple[int, Any]:
    async with daemon.post("/v1/completions", body) as response:
        return response.status, await response.json()


async def test_closing_ends_what_runs_and_what_waits(start: Any) -> None:
    daemon = await start(slots=1, delay=0.001)
    engine = daemon.service.engine
    streams = [engine.submit(_request([number], 4000)) for number in (1, 2)]
    await daemon.until(lambda load: load.busy and load.queued)
    await asyncio.to_thread(engine.close)
    for stream in streams:
        with pytest.raises(EngineClosed, match="shutting down"):
            await _consume(stream)
    with pytest.raises(EngineClosed):
        engine.submit(_request([1], 1))
    engine.close()
    assert daemon.model.open_sessions == 0
