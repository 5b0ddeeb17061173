"""Cache-aware routing: off, it changes nothing; on, tokens that are decoded take what is in memory.

Which experts those are, and what they weigh, is checked number by number in native/store_driver.c.
"""

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
from tiny_model import last_row

EXPERT_BYTES, LAYERS, TOP_K = 24576, 4, 2
BUDGET = 24 * EXPERT_BYTES  # of 64


def substituted(model: Model) -> list[int]:
    """How many experts were replaced, by layer."""
    return [counters.substituted for counters in model.expert_counters()]


def test_without_a_margin_nothing_changes(demo: Artifact, demo_logits: NDArray[np.float32]) -> None:
    with Model(demo, 2, BUDGET) as model:
        model.prefer_resident_experts(0.0)
        assert np.array_equal(decode(model, TOKENS), demo_logits)
        assert substituted(model) == [0] * LAYERS


def test_mapped_experts_and_prompts_are_never_replaced(
    demo: Artifact, demo_logits: NDArray[np.float32]
) -> None:
    with Model(demo, 2) as model:
        model.prefer_resident_experts(1.0)
        assert np.array_equal(decode(model, TOKENS), demo_logits)
        model.set_expert_budget(BUDGET)
        with model.open_session(len(TOKENS)) as session:
            assert last_row(session.prefill(TOKENS)) == demo_logits[-1].tolist()
        assert substituted(model) == [0] * LAYERS


@pytest.mark.parametrize("margin", [0.02, 1.0])
def test_replaced_experts_are_not_read(demo: Artifact, margin: float) -> None:
    with Model(demo, 2, BUDGET) as model:
        model.prefer_resident_experts(margin)
        first = decode(model, TOKENS)
        counters = model.expert_counters()
        for cost in counters:
            assert cost.hits + cost.misses == TOP_K * len(TOKENS)
            assert cost.bytes == cost.misses * EXPERT_BYTES
            assert 0 < cost.substituted <= cost.hits
        model.set_expert_budget(None)
        model.set_expert_budget(BUDGET)  # nothing is in memory, as at first
        assert np.array_equal(decode(model, TOKENS), first)
    with Model(demo, 2, BUDGET) as plain:
        decode(plain, TOKENS)
        assert sum(c.misses for c in plain.expert_counters()) > sum(c.misses for c in counters)


def test_the_first_expert_is_never_replaced(demo: Artifact) -> None:
    """With one slot more than a layer needs, hardly anything else is in memory."""
    with Model(demo, 2, 3 * EXPERT_BYTES) as model, model.open_session(len(TOKENS)) as session:
        model.prefer_resident_experts(1.0)
        with RoutingTrace(model) as trace:
            for token in TOKENS:
                model.step_batch([session], [token])
                resident = model.resident_experts()
                (ids,) = trace.take().ids.tolist()
                last = LAYERS - 1  # whose experts nothing has made place since
                assert resident[last * 16 + ids[last][0]]


def test_a_trace_and_the_watch_note_what_the_router_chose(demo: Artifact) -> None:
    """In the first layer, which no replacement is before."""
    with Model(demo, 2) as plain, RoutingTrace(plain) as trace:
        decode(plain, TOKENS)
        routing = trace.take()
    with Model(demo, 2, BUDGET) as model, RoutingTrace(model) as trace:
        model.prefer_resident_experts(1.0)
        decode(model, TOKENS)
        other = trace.take()
        assert np.asarray(other.ids)[:, 0].tolist() == np.asarray(routing.ids)[:, 0].tolist()
        assert np.array_equal(np.asarray(other.weights)[:, 0], np.asarray(routing.weights)[:, 0])
        assert model.chosen_experts()[:16] == plain.chosen_experts()[:16]
        assert substituted(model)[0] > 0


def test_tokens_of_a_batch_are_decoded(demo: Artifact) -> None:
    with Model(demo, 2, BUDGET) as model:
        model.prefer_resident_experts(1.0)
        with model.open_session(64) as first, model.open_session(64) as second:
            for token in TOKENS:
                model.step_batch([first, second], [token, (token + 7) % 500])
        assert min(substituted(model)) > 0


@pytest.mark.parametrize(("margin", "most"), [(0.01, 1e-3), (0.1, 0.1)])
def test_a_small_margin_costs_little(
    demo: Artifact, demo_logits: NDArray[np.float32], margin: float, most: float
) -> None:
    with Model(demo, 2, BUDGET) as model:
        model.prefer_resident_experts(margin)
        found = compare(decode(model, TOKENS), demo_logits)
        assert sum(substituted(model)) > 0 and 0 < found.mean_kl < most


@pytest.mark.parametrize("margin", [-0.1, 1.1, float("nan")])
def test_wrong_margins_are_refused(demo: Artifact, margin: float) -> None:
    with Model(demo, 1) as model, pytest.raises(EmberdError, match="expected 0 to 1"):
        model.prefer_resident_experts(margin)
