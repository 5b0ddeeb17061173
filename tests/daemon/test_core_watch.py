"""What can be seen of experts: which are in memory, and how often each was chosen."""

from __future__ import annotations

from collections import Counter

import pytest
from emberd.daemon.artifact import Artifact
from emberd.daemon.core import Model
from emberd.daemon.trace import RoutingTrace

PROMPT = [(7 * i * i + 3 * i) % 500 for i in range(40)]


@pytest.mark.parametrize("slots", [None, 12])
def test_choices_are_those_of_the_routing(demo: Artifact, slots: int | None) -> None:
    with Model(demo, 1) as model:
        if slots is not None:
            model.set_expert_budget(slots * model.experts.expert_bytes)
        assert not any(model.chosen_experts())
        with RoutingTrace(model) as trace, model.open_session(64) as session:
            session.prefill(PROMPT)
            session.step([3])
            ids = trace.take().ids.tolist()
        expected = Counter(
            layer * 16 + expert
            for token in ids
            for layer, chosen in enumerate(token)
            for expert in chosen
        )
        assert list(model.chosen_experts()) == [expected[index] for index in range(64)]
        assert sum(model.chosen_experts()) == 41 * 4 * 2


def test_all_experts_are_resident_unless_a_budget_says_otherwise(demo: Artifact) -> None:
    with Model(demo, 1) as model, model.open_session(64) as session:
        assert list(model.resident_experts()) == [1] * 64
        model.set_expert_budget(12 * model.experts.expert_bytes)
        assert not any(model.resident_experts())
        for token in PROMPT:
            with RoutingTrace(model) as trace:
                session.step([token])
                (ids,) = trace.take().ids.tolist()
            resident = model.resident_experts()
            assert sum(resident) == min(12, sum(map(bool, model.chosen_experts())))
            assert all(resident[layer * 16 + e] for layer, row in enumerate(ids) for e in row)
        model.set_expert_budget(3 * model.experts.expert_bytes)
        assert sum(model.resident_experts()) == 3
        model.set_expert_budget(None)
        assert list(model.resident_experts()) == [1] * 64
