"""Shortcuts are taken by tokens that are decoded, and never while a prompt is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from emberd.daemon.artifact import Artifact
from emberd.daemon.core import Model
from emberd.daemon.session import LogitsRole, Session
from emberd.daemon.shortcuts import Shortcuts
from tiny_model import last_row

Read = Callable[[Session, Sequence[int]], list[float]]

BUDGET = 24 * 24576  # of 64 experts
SHORTCUTS = [Shortcuts(routing_margin=1.0), Shortcuts(stall_deadline=1e-9, stall_weight=1.0)]


def tokens(count: int, first: int = 0) -> list[int]:
    return [(7 * i * i + 3 * i) % 500 for i in range(first, first + count)]


def taken(model: Model) -> int:
    """Experts that were replaced or skipped."""
    return sum(cost.substituted + cost.skipped for cost in model.expert_counters())


@pytest.fixture(scope="module")
def demo(demo_artifact: Path) -> Artifact:
    return Artifact.open(demo_artifact)


def prefill(session: Session, prompt: Sequence[int]) -> list[float]:
    return last_row(session.prefill(prompt))


def step_by_step(session: Session, prompt: Sequence[int]) -> list[float]:
    """The last token of the prompt in a step of its own."""
    if prompt[:-1]:
        session.prefill(prompt[:-1], LogitsRole.NONE)
    return last_row(session.step(prompt[-1:]))


def _alone(session: Session, read: Read, prompt: Sequence[int]) -> list[float]:
    session.reset()
    return read(session, prompt)


@pytest.mark.parametrize("shortcuts", SHORTCUTS, ids=["routing_margin", "stall_deadline"])
@pytest.mark.parametrize("count", [1, 33, 513])
@pytest.mark.parametrize("read", [prefill, step_by_step])
def test_prompts_of_any_length_take_none(
    demo: Artifact,
    shortcuts: Shortcuts,
    count: int,
    read: Read,
) -> None:
    prompts = [tokens(count, first) for first in range(5)]  # some experts are there after one
    with Model(demo, 2) as whole, whole.open_session(count) as session:
        expected = [_alone(session, read, prompt) for prompt in prompts]
    with Model(demo, 2, BUDGET) as model, model.open_session(count) as session:
        shortcuts.apply(model)
        assert [_alone(session, read, prompt) for prompt in prompts] == expected
        assert taken(model) == 0


@pytest.mark.parametrize("shortcuts", SHORTCUTS, ids=["routing_margin", "stall_deadline"])
def test_tokens_that_are_decoded_take_them(demo: Artifact, shortcuts: Shortcuts) -> None:
    with Model(demo, 2, BUDGET) as model, model.open_session(96) as session:
        shortcuts.apply(model)
        session.prefill(tokens(33), LogitsRole.NONE)
        for token in tokens(60):
            model.step_batch([session], [token])
        assert taken(model) > 0


@pytest.mark.parametrize("shortcuts", SHORTCUTS, ids=["routing_margin", "stall_deadline"])
def test_a_batch_replaces_experts_but_skips_none(demo: Artifact, shortcuts: Shortcuts) -> None:
    with Model(demo, 2, BUDGET) as model:
        shortcuts.apply(model)
        with model.open_session(64) as first, model.open_session(64) as second:
            for token in tokens(60):
                model.step_batch([first, second], [token, (token + 7) % 500])
        assert (taken(model) > 0) == (shortcuts.routing_margin > 0)
