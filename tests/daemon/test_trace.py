"""Traces note the routing of every token that was run while they were entered."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from emberd.daemon.artifact import Artifact
from emberd.daemon.core import Model
from emberd.daemon.errors import EmberdError
from emberd.daemon.program import StepKind
from emberd.daemon.session import LogitsRole
from emberd.daemon.trace import RoutingTrace
from tiny_model import PROMPT

UNFUSED = "needs an artifact built with moa_fusion: build this one again"
BAD_EXPERT = 13  # a token whose second expert does not exist


def expected_ids(tokens: list[int]) -> list[list[list[int]]]:
    """What the kernel `choose` of the tiny model's single layer does."""
    return [[[token % 4, token // 3]] for token in tokens]


def expected_weights(tokens: list[int]) -> list[list[list[float]]]:
    return [[[1 - token / 32, token / 32]] for token in tokens]


def test_notes_prompts_tokens_and_batches_in_order(model: Model) -> None:
    with model.open_session(300) as first, model.open_session(300) as second:
        first.step([2])
        with RoutingTrace(model) as trace:
            first.prefill(PROMPT * 5, LogitsRole.NONE)  # grows, in chunks of 32 and less
            second.step([7])
            model.step_batch([first, second], [5, 9])
        second.step([1])
        run = [*PROMPT * 5, 7, 5, 9]
        assert trace.tokens == len(run)
        routing = trace.take()
        assert routing.ids.tolist() == expected_ids(run)
        assert routing.weights.tolist() == expected_weights(run)
        assert trace.tokens == 0
        with trace:
            first.step([8])
            assert trace.take().ids.tolist() == expected_ids([8])
            first.step([3])
            assert trace.take().ids.tolist() == expected_ids([3])


def test_a_step_that_fails_notes_nothing(model: Model) -> None:
    with model.open_session(8) as session, RoutingTrace(model) as trace:
        session.step([1])
        with pytest.raises(EmberdError, match="layer 0 chose expert 4"):
            session.step([2, BAD_EXPERT])
        session.reset()
        session.step([3])
    assert trace.take().ids.tolist() == expected_ids([1, 3])


def test_a_trace_without_room_refuses_the_step(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = RoutingTrace(model)
    trace.reserve(1, 1)
    monkeypatch.setattr(trace, "reserve", lambda _tokens, _sessions: None)
    with model.open_session(200) as session, trace:
        session.prefill([1] * 64)
        with pytest.raises(EmberdError, match="room for 64 tokens and holds 64: 1 more"):
            session.step([1])
        assert trace.take().ids.shape == (64, 1, 2)
        session.step([1])  # nothing was done before, so the session goes on
        assert session.length == 65


def test_a_program_without_router_weights(tiny: Any, tmp_path: Path) -> None:
    sequences = tuple(
        replace(
            sequence,
            steps=tuple(
                replace(step, arguments=(step.arguments[0], *step.arguments[3:]))
                if step.kind is StepKind.ACQUIRE_EXPERTS
                else step
                for step in sequence.steps
            ),
        )
        for sequence in tiny.program.sequences
    )
    program = replace(tiny.program, sequences=sequences)
    with Model(Artifact.open(tiny.write(tmp_path / "a", program)), 1) as model:
        trace = RoutingTrace(model)
        with pytest.raises(EmberdError, match=f"a routing trace {UNFUSED}"), trace:
            pass
        with pytest.raises(EmberdError, match=f"stall_deadline {UNFUSED}"):
            model.break_stalls(1.0, 0.1)
        with pytest.raises(EmberdError, match=f"routing_margin {UNFUSED}"):
            model.prefer_resident_experts(0.1)
        model.break_stalls(0.0, 0.1)
        model.prefer_resident_experts(0.0)
        with model.open_session(8) as session:
            session.step([1])
    with pytest.raises(EmberdError, match="closed"), trace:
        pass
    assert trace.tokens == 0
