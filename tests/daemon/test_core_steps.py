"""Steps of the core on the tiny model: exactly its specification, however the tokens are cut and
on any number of threads; and what a step refuses."""

from __future__ import annotations

import struct
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from emberd.daemon.artifact import Artifact
from emberd.daemon.core import Model
from emberd.daemon.errors import EmberdError
from emberd.daemon.session import ContextOverflow, LogitsRole, Session
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_model import PROMPT, last_row


def expected(tiny: Any, tokens: Sequence[int]) -> list[float]:
    """The specification's last row, rounded to float32 as the kernels' results are."""
    row = tiny.logits(tokens)[-1]
    return list(struct.unpack(f"{len(row)}f", struct.pack(f"{len(row)}f", *row)))


def run(session: Session, cuts: Sequence[int]) -> list[float]:
    """The last logits of PROMPT, cut as told."""
    start = 0
    for size in cuts:
        logits = session.step(PROMPT[start : start + size])
        start += size
    return last_row(logits)


def test_logits_of_every_position(tiny: Any, model: Model) -> None:
    with model.open_session(100) as session:
        logits = session.step([3, 1, 4, 1], LogitsRole.ALL)
        assert logits is not None
        assert logits.rows == 4
        assert logits.memory().tolist() == tiny.logits([3, 1, 4, 1])


@pytest.mark.parametrize("length", [1, 3, 4, 5, 29])
def test_prefill_continues_the_specification(tiny: Any, model: Model, length: int) -> None:
    with model.open_session(100) as session:
        row = last_row(session.prefill(PROMPT[:length]))
        assert row == pytest.approx(expected(tiny, PROMPT[:length]), rel=1e-5, abs=1e-5)
        assert session.length == length


@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.too_slow])
@given(cuts=st.lists(st.integers(1, 9), min_size=29))
def test_results_do_not_depend_on_the_cut(tiny_artifact: Artifact, cuts: list[int]) -> None:
    while sum(cuts) > len(PROMPT):
        cuts.pop()
    cuts += [1] * (len(PROMPT) - sum(cuts))
    with Model(tiny_artifact, threads=1) as model, model.open_session(64) as session:
        whole = run(session, [1] * len(PROMPT))
        session.reset()
        assert run(session, cuts) == whole


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_results_do_not_depend_on_threads(tiny_artifact: Artifact, threads: int) -> None:
    with Model(tiny_artifact, threads=1) as one, one.open_session(64) as session:
        single = last_row(session.prefill(PROMPT))
    with Model(tiny_artifact, threads=threads) as model, model.open_session(64) as session:
        assert model.threads == threads
        for _ in range(20):
            session.reset()
            assert last_row(session.prefill(PROMPT)) == single


def test_no_logits_when_not_asked(model: Model) -> None:
    with model.open_session(8) as session:
        assert session.step([1], LogitsRole.NONE) is None
        assert session.length == 1


def test_sessions_do_not_mix(tiny: Any, model: Model) -> None:
    with model.open_session(64) as first, model.open_session(80) as second:
        for i in range(8):
            a = last_row(first.step([PROMPT[i]]))
            b = last_row(second.step([PROMPT[i + 8]]))
        assert a == pytest.approx(expected(tiny, PROMPT[:8]), rel=1e-6, abs=1e-6)
        assert b == pytest.approx(expected(tiny, PROMPT[8:16]), rel=1e-6, abs=1e-6)


def test_sessions_in_threads_of_their_own(model: Model) -> None:
    results: dict[int, list[list[float]]] = {}

    def converse(index: int) -> None:
        with model.open_session(64) as session:
            for token in PROMPT[index:20]:
                session.step([token], LogitsRole.NONE)
            results[index] = [[session.length]]

    threads = [threading.Thread(target=converse, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {index: [[20 - index]] for index in range(6)}


def test_overflow_changes_nothing(model: Model) -> None:
    with model.open_session(6) as session:
        session.prefill(PROMPT[:5])
        with pytest.raises(ContextOverflow, match="the session has 5 of 6"):
            session.prefill([1, 2])
        assert session.length == 5
        session.step([1])
        with pytest.raises(ContextOverflow):
            session.step([1])


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], "no tokens"),
        ([1] * 33, "a step of 33 tokens: this model takes 32"),
        ([16], "outside the vocabulary of 16"),
        ([-1], "outside the vocabulary of 16"),
        ([2**40], "integers below 16"),
        (["a"], "integers below 16"),
    ],
)
def test_bad_tokens(model: Model, tokens: list[Any], message: str) -> None:
    with model.open_session(64) as session:
        with pytest.raises(EmberdError, match=message):
            session.step(tokens)
        assert session.length == 0
        session.step([1])


def test_prefill_checks_every_token_first(model: Model) -> None:
    with model.open_session(64) as session:
        with pytest.raises(EmberdError, match="token id 99"):
            session.prefill([1] * 9 + [99])
        assert session.length == 0


def test_all_logits_of_several_chunks_are_refused(model: Model) -> None:
    with model.open_session(64) as session:
        with pytest.raises(EmberdError, match="step by step"):
            session.prefill([1] * 33, LogitsRole.ALL)
        logits = session.prefill([1] * 31, LogitsRole.ALL)
        assert logits is not None
        assert logits.rows == 31
