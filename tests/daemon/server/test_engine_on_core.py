"""The engine on the native core: reuse, interleaving and restarts change no token."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from emberd.daemon.core import Model
from emberd.daemon.engine import Engine, GenerationFailed
from emberd.daemon.generation import Delta, Request
from emberd.daemon.job import LEAST_SAVED
from emberd.daemon.metrics import open_files, resident_bytes
from emberd.daemon.sampling import SamplingParameters
from emberd.daemon.session import Session
from emberd.daemon.stream import Stream

GOOD = 12  # the tiny model fails at greater tokens


@pytest.fixture
async def engine(tiny_artifact: Any, tokenizer: Any) -> AsyncIterator[Engine]:
    engine = _engine(tiny_artifact, tokenizer, slots=2)
    yield engine
    engine.close()


def _engine(artifact: Any, tokenizer: Any, slots: int, keep_alive: float = -1) -> Engine:
    return Engine(
        lambda: Model(artifact, 1),
        tokenizer,
        slots=slots,
        context=512,
        max_queue=50,
        keep_alive=keep_alive,
    )


def _request(
    prompt: list[int], choices: int = 1, boundary: int | None = None, max_tokens: int = 12
) -> Request:
    return Request(
        prompt=prompt,
        boundary=boundary,
        max_tokens=max_tokens,
        sampling=SamplingParameters(
            temperature=3.0, seed=5, logprobs=0, logit_bias=dict.fromkeys(range(GOOD, 16), -1e9)
        ),
        stop_tokens=frozenset(),
        choices=choices,
    )


async def _answer(engine: Engine, request: Request) -> tuple[list[list[tuple[int, Any]]], int]:
    """Tokens and log probabilities per choice, and how much of the prompt was cached."""
    return await _collected(engine.submit(request))


async def _collected(stream: Stream) -> tuple[list[list[tuple[int, Any]]], int]:
    answers: list[list[tuple[int, Any]]] = [[] for _ in range(stream.request.choices)]
    async with stream:
        async for event in stream:
            if isinstance(event, Delta):
                answers[event.choice] += [(s.token, s.logprob) for s in event.logprobs]
    return answers, stream.usage.cached_tokens


def _prompts() -> list[list[int]]:
    """Random prompts that share beginnings, in random order."""
    rng = random.Random(3)
    stems = [[rng.randrange(GOOD) for _ in range(60)] for _ in range(3)]
    prompts = [
        stem[: rng.randint(1, 60)] + [rng.randrange(GOOD) for _ in range(rng.randint(1, 40))]
        for stem in stems
        for _ in range(8)
    ]
    rng.shuffle(prompts)
    return prompts


@pytest.mark.usefixtures("every_boundary")
async def test_cached_and_interleaved_answers_equal_fresh_ones(
    engine: Engine, tiny_artifact: Any, tokenizer: Any
) -> None:
    requests = [_request(p, 1 + i % 3, len(p) // 2 or None) for i, p in enumerate(_prompts())]
    expected = []
    for request in requests:
        fresh = Engine(
            lambda: Model(tiny_artifact, 1), tokenizer, slots=1, context=512, max_queue=1
        )
        expected.append((await _answer(fresh, request))[0])
        fresh.close()
    in_turn = [await _answer(engine, request) for request in requests]
    assert [answer for answer, _ in in_turn] == expected
    assert sum(cached > 0 for _, cached in in_turn) >= 4
    at_once = await asyncio.gather(*(_answer(engine, request) for request in requests))
    assert [answer for answer, _ in at_once] == expected


async def test_the_same_prompt_again_prefills_one_token(engine: Engine) -> None:
    prompt = list(range(GOOD)) * 3
    first, _ = await _answer(engine, _request(prompt))
    again, cached = await _answer(engine, _request(prompt))
    assert (again, cached) == (first, len(prompt) - 1)


@pytest.mark.parametrize(
    ("tokens", "steps"),
    [
        (1, [1]),
        (LEAST_SAVED, [LEAST_SAVED]),  # one less is before the last token
        (LEAST_SAVED + 1, [LEAST_SAVED, 1]),
        (40, [32, 7, 1]),
    ],
)
async def test_a_short_prompt_is_one_step(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, tokens: int, steps: list[int]
) -> None:
    """A cold one reads most of the weights: not twice, to keep a snapshot that saves little."""
    taken: list[int] = []
    step = Session.step

    def counted(session: Session, ids: Any, logits: Any) -> Any:
        taken.append(len(ids))
        return step(session, ids, logits)

    monkeypatch.setattr(Session, "step", counted)
    await _answer(engine, _request([5] * tokens, max_tokens=1))
    assert taken == steps


@pytest.mark.parametrize(("token", "reason"), [(999, "outside the vocabulary"), (13, "expert 4")])
async def test_a_failed_step_leaves_the_engine_working(
    engine: Engine, token: int, reason: str
) -> None:
    with pytest.raises(GenerationFailed, match=reason):
        await _answer(engine, _request([1, 2, token]))
    assert (await _answer(engine, _request([1, 2, 3])))[0][0]


async def test_a_failed_step_of_several_fails_only_the_one_at_fault(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    long = _request([1, 2, 3], choices=2, max_tokens=200)
    expected, _ = await _answer(engine, long)
    at_fault = _request([5] * 90)
    at_fault = replace(at_fault, sampling=replace(at_fault.sampling, logit_bias={13: 1e9}))
    with engine._changed:  # both are there before the next round
        streams = engine.submit(long), engine.submit(at_fault)
    answer, failure = await asyncio.gather(*map(_collected, streams), return_exceptions=True)
    assert answer == (expected, len(long.prompt) - 1)
    assert isinstance(failure, GenerationFailed) and "expert 4" in str(failure)
    assert "a step of 2 requests failed" in caplog.text
    assert dict(engine.metrics.requests) == {
        "completed": 2, "cancelled": 0, "failed": 1, "refused": 0
    }  # fmt: skip


async def _unloaded(engine: Engine) -> None:
    async with asyncio.timeout(10):
        while engine.load.loaded:
            await asyncio.sleep(0)


async def test_an_unloaded_model_answers_as_before(tiny_artifact: Any, tokenizer: Any) -> None:
    engine = _engine(tiny_artifact, tokenizer, slots=2, keep_alive=0)
    requests = [_request(prompt) for prompt in _prompts()[:6]]
    answers = []
    for request in requests * 2:
        answers.append(await _answer(engine, request))
        await _unloaded(engine)
    engine.close()
    assert answers[:6] == answers[6:]
    assert {cached for _, cached in answers} == {0}
    assert engine.metrics.wakes >= 11


async def test_a_thousand_wakes_leave_nothing_behind(tiny_artifact: Any, tokenizer: Any) -> None:
    engine = _engine(tiny_artifact, tokenizer, slots=2, keep_alive=0)
    request = _request([1, 2, 3], max_tokens=2)
    seen = []
    gc.collect()  # mailboxes of other tests
    for count in range(1, 1101):
        await _answer(engine, request)
        await _unloaded(engine)
        if count in (100, 1100):
            seen.append((open_files(), resident_bytes()))
    engine.close()
    (files, memory), (files_after, memory_after) = seen
    assert engine.metrics.wakes >= 1099
    assert files_after == files
    assert memory_after - memory < 1 << 20
