"""What asks the next router has memory of its own, and stands after every acquire but the last."""

from __future__ import annotations

from pathlib import Path

import pytest
from emberd.daemon.artifact import Artifact
from emberd.daemon.program import Program, Sequence, StepKind

CALL_AHEAD = StepKind.CALL_AHEAD


@pytest.fixture(scope="module")
def program(demo_artifact: Path) -> Program:
    return Program.decode(Artifact.open(demo_artifact).program)


def of_role(program: Program, role: str) -> list[Sequence]:
    return [sequence for sequence in program.sequences if sequence.role == role]


@pytest.mark.parametrize("role", ["body", "batch"])
def test_every_layer_but_the_last_asks_the_next(program: Program, role: str) -> None:
    for sequence in of_role(program, role):
        acquired = [s.symbol for s in sequence.steps if s.kind is StepKind.ACQUIRE_EXPERTS]
        expected = [s.symbol for s in sequence.steps if s.kind is StepKind.EXPECT_EXPERTS]
        assert expected == acquired[1:]
        called = [s for s in sequence.steps if s.kind is CALL_AHEAD]
        assert len(called) == 2 * len(expected)


def test_they_call_what_the_next_layer_calls(program: Program) -> None:
    """The same kernels with the same weights, norm and router, one layer later."""
    for sequence in of_role(program, "batch"):
        ahead = [(s.symbol, s.arguments[1]) for s in sequence.steps if s.kind is CALL_AHEAD]
        calls = [(s.symbol, s.arguments[1]) for s in sequence.steps if s.kind is StepKind.CALL]
        places = [calls.index(call) for call in ahead]
        assert places == sorted(places)
        assert all(
            norm + 1 == router for norm, router in zip(places[::2], places[1::2], strict=True)
        )


def test_what_they_write_is_theirs_alone(program: Program) -> None:
    for sequence in of_role(program, "body"):
        own: set[int] = set()
        for step in sequence.steps:
            if step.kind is CALL_AHEAD:
                own |= set(step.arguments[2:])
        assert own
        for step in sequence.steps:
            if step.kind not in (CALL_AHEAD, StepKind.EXPECT_EXPERTS):
                assert not own & set(step.arguments)
