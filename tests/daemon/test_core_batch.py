"""Batches: a token of each of several sessions in one step, exactly as each would go on alone."""

from __future__ import annotations

from typing import Any

import pytest
from emberd.daemon.artifact import Artifact
from emberd.daemon.core import Model
from emberd.daemon.errors import EmberdError
from emberd.daemon.session import ContextOverflow
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_model import PROMPT, last_row

TOKENS = st.integers(0, 11)


@settings(deadline=None, max_examples=30)
@given(
    prompts=st.lists(st.lists(TOKENS, min_size=1, max_size=20), min_size=1, max_size=9),
    rounds=st.lists(st.lists(TOKENS, min_size=9, max_size=9), min_size=1, max_size=4),
    threads=st.integers(1, 3),
)
def test_a_batch_gives_each_session_its_own_logits(
    tiny_artifact: Artifact, prompts: list[list[int]], rounds: list[list[int]], threads: int
) -> None:
    with Model(tiny_artifact, threads=threads) as model:
        together = [model.open_session(64) for _ in prompts]
        alone = [model.open_session(80) for _ in prompts]
        for prompt, *sessions in zip(prompts, together, alone, strict=True):
            for session in sessions:
                session.prefill(prompt)
        for tokens in rounds:
            tokens = tokens[: len(prompts)]
            logits = model.step_batch(together, tokens)
            assert logits.rows == len(prompts)
            rows = logits.memory().tolist()
            assert rows == [last_row(s.step([t])) for s, t in zip(alone, tokens, strict=True)]
        assert [session.length for session in together] == [session.length for session in alone]


def test_sessions_join_and_leave_at_any_step(model: Model) -> None:
    whole = model.open_session(64)
    expected = [last_row(whole.step([token])) for token in PROMPT[:12]]
    session, other, third = (model.open_session(64) for _ in range(3))
    rows = []
    for i, token in enumerate(PROMPT[:12]):
        members = [session, *([other] if i % 2 else []), *([third] if i % 3 else [])]
        members = members[::-1] if i % 5 == 0 else members
        logits = model.step_batch(members, [token if m is session else 7 for m in members])
        rows.append(logits.memory().tolist()[members.index(session)])
    assert rows == expected


def test_rows_are_apart(model: Model) -> None:
    sessions = [model.open_session(8) for _ in range(3)]
    logits = model.step_batch(sessions, [1, 2, 3])
    before = [logits.get(5, row) for row in range(3)]
    logits.bias({5: 100.0}, row=1)
    assert [logits.get(5, row) for row in range(3)] == [before[0], before[1] + 100, before[2]]
    assert logits.top(1, row=1)[0] == [5]
    assert logits.get(5) == before[2]
    with pytest.raises(EmberdError, match="row 3 of 3"):
        logits.get(5, row=3)
    sessions[0].step([1])
    with pytest.raises(EmberdError, match="another step"):
        logits.get(5, row=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda sessions, tokens: tokens.pop(), "1 tokens for a batch of 2"),
        (lambda sessions, tokens: sessions.__setitem__(1, sessions[0]), "2 tokens for a batch"),
        (lambda sessions, tokens: tokens.__setitem__(1, 16), "outside the vocabulary"),
        (lambda sessions, tokens: tokens.__setitem__(1, -1), "outside the vocabulary"),
        (lambda sessions, tokens: tokens.__setitem__(1, 1.5), "must be integers"),
        (lambda sessions, tokens: (sessions.clear(), tokens.clear()), "a batch of 0"),
        (lambda sessions, tokens: sessions[1].close(), "closed"),
    ],
)
def test_a_bad_batch_changes_nothing(model: Model, change: Any, message: str) -> None:
    first = model.open_session(8)
    sessions, tokens = [first, model.open_session(8)], [1, 2]
    change(sessions, tokens)
    with pytest.raises(EmberdError, match=message):
        model.step_batch(sessions, tokens)
    assert first.length == 0
    first.step([1])


def test_a_full_session_refuses_the_batch(model: Model) -> None:
    first, full = model.open_session(8), model.open_session(1)
    full.step([1])
    with pytest.raises(ContextOverflow):
        model.step_batch([first, full], [1, 1])
    assert (first.length, full.length) == (0, 1)


def test_a_session_of_another_model_is_refused(tiny_artifact: Artifact, model: Model) -> None:
    with Model(tiny_artifact, threads=1) as other:
        sessions = [model.open_session(8), other.open_session(8)]
        with pytest.raises(EmberdError, match="of another model"):
            model.step_batch(sessions, [1, 1])


def test_a_failing_step_fails_every_session_of_the_batch(model: Model) -> None:
    bad_expert = 12
    sessions = [model.open_session(8) for _ in range(2)]
    bystander = model.open_session(8)
    with pytest.raises(EmberdError, match="layer 0 chose expert 4 of 4"):
        model.step_batch(sessions, [1, bad_expert])
    for session in sessions:
        with pytest.raises(EmberdError, match="reset it"):
            session.step([1])
        session.reset()
        session.step([1])
    bystander.step([1])


def test_going_back_still_works_after_a_batch(model: Model) -> None:
    session, other = model.open_session(64), model.open_session(64)
    session.prefill(PROMPT[:6])
    snapshot = session.snapshot()
    first = model.step_batch([session, other], [4, 5]).memory().tolist()[0]
    session.restore(snapshot)
    assert model.step_batch([other, session], [6, 4]).memory().tolist()[1] == first
