"""The stall breaker: off, or within its time, it changes nothing; else it skips what it may."""

from __future__ import annotations

import numpy as np
import pytest
from decoding import TOKENS, decode
from emberd.compile.verify import compare
from emberd.daemon.artifact import Artifact
from emberd.daemon.core import Model
from emberd.daemon.errors import EmberdError
from emberd.daemon.trace import RoutingTrace
from numpy.typing import NDArray

AT_ONCE = 1e-9  # seconds: no step waits for what it may skip, but in its first layer


def light(weights: NDArray[np.float32], bound: float) -> NDArray[np.bool_]:
    """The specification: which of a token's experts, weights [..., top_k], may be skipped."""
    greatest = np.arange(weights.shape[-1]) == weights.argmax(-1)[..., None]
    result: NDArray[np.bool_] = (weights < np.float32(bound)) & ~greatest
    return result


def skipped(model: Model) -> list[int]:
    """How many experts were skipped, by layer."""
    return [counters.skipped for counters in model.expert_counters()]


@pytest.mark.parametrize(
    ("deadline", "weight"), [(0.0, 1.0), (3600.0, 1.0), (AT_ONCE, 0.0)], ids=str
)
def test_nothing_changes_while_nothing_may_be_skipped(
    demo: Artifact, demo_logits: NDArray[np.float32], deadline: float, weight: float
) -> None:
    with Model(demo, 2, 5 * 24576) as model:
        model.break_stalls(deadline, weight)
        assert np.array_equal(decode(model, TOKENS), demo_logits)
        assert skipped(model) == [0] * 4


def test_mapped_experts_prompts_and_batches_are_never_skipped(
    demo: Artifact, demo_logits: NDArray[np.float32]
) -> None:
    with Model(demo, 2) as model:
        model.break_stalls(AT_ONCE, 1.0)
        assert np.array_equal(decode(model, TOKENS), demo_logits)
        model.set_expert_budget(5 * 24576)
        with model.open_session(64) as first, model.open_session(64) as second:
            for session in first, second:
                session.prefill(TOKENS[:30])
            model.step_batch([first, second], TOKENS[:2])
        assert skipped(model) == [0] * 4


@pytest.mark.parametrize("bound", [0.3, 0.45, 1.0])
def test_light_experts_that_are_missing_are_skipped(demo: Artifact, bound: float) -> None:
    """With an empty store all are missing; in the first layer a read may be in time."""
    seen = 0
    for token in TOKENS[:8]:
        with Model(demo, 2, 60 * 24576) as model, model.open_session(8) as session:
            model.break_stalls(AT_ONCE, bound)
            with RoutingTrace(model) as trace:
                model.step_batch([session], [token])
            may_go = light(np.asarray(trace.take().weights)[0], bound).sum(-1)
            first, *others = skipped(model)
            assert first <= may_go[0] and others == may_go[1:].tolist()
            assert [c.misses for c in model.expert_counters()] == [2] * 4
            for layer, counters in list(enumerate(model.expert_counters()))[1:]:
                assert counters.bytes == (2 - may_go[layer]) * 24576
            seen += sum(others)
            model.break_stalls(0.0, bound)
            model.step_batch([session], [token])
            assert skipped(model) == [first, *others]
    assert seen > 0


def test_what_is_skipped_costs_little(demo: Artifact, demo_logits: NDArray[np.float32]) -> None:
    with Model(demo, 2, 8 * 24576) as model:
        model.break_stalls(AT_ONCE, 0.1)
        found = compare(decode(model, TOKENS), demo_logits)
        assert sum(skipped(model)) > 0 and 0 < found.mean_kl < 0.1


@pytest.mark.parametrize(
    ("deadline", "weight"), [(-1.0, 0.5), (3601.0, 0.5), (float("nan"), 0.5), (1.0, 1.5)]
)
def test_wrong_bounds_are_refused(demo: Artifact, deadline: float, weight: float) -> None:
    with Model(demo, 1) as model, pytest.raises(EmberdError, match="expected 0 to 3600 s and"):
        model.break_stalls(deadline, weight)
