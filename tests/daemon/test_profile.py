"""Profiles count the calls that the program makes, and only while they are entered."""

from __future__ import annotations

import pytest
from emberd.daemon.artifact import Artifact
from emberd.daemon.core import Model
from emberd.daemon.errors import EmberdError
from emberd.daemon.profile import Profile
from emberd.daemon.session import LogitsRole

BODY = {"embed", "accumulate", "remember", "choose", "acquire_experts", "apply_experts"}


@pytest.mark.parametrize("threads", [1, 2])
def test_counts_every_step(tiny_artifact: Artifact, threads: int) -> None:
    with Model(tiny_artifact, threads) as model, model.open_session(64) as session:
        session.step([1])
        with Profile(model) as profile:
            session.step([3, 1, 4, 1], LogitsRole.NONE)
            session.step([5], LogitsRole.NONE)
            session.step([9], LogitsRole.LAST)
        session.step([2])
        costs = profile.costs()
    assert {cost.symbol: cost.calls for cost in costs} == dict.fromkeys(BODY, 3) | {"head": 1}
    seconds = [cost.seconds for cost in costs]
    assert seconds == sorted(seconds, reverse=True)
    assert all(second > 0 for second in seconds)


def test_results_are_the_same_while_timed(tiny_artifact: Artifact) -> None:
    with Model(tiny_artifact, 2) as model, model.open_session(64) as session:
        plain = session.prefill([3, 1, 4, 1, 5])
        assert plain is not None
        expected = plain.memory().tolist()
        session.reset()
        with Profile(model):
            timed = session.prefill([3, 1, 4, 1, 5])
        assert timed is not None
        assert timed.memory().tolist() == expected


def test_a_closed_model(tiny_artifact: Artifact) -> None:
    with Model(tiny_artifact, 1) as model, Profile(model) as profile:
        pass
    with pytest.raises(EmberdError, match="closed"), profile:
        pass
    assert profile.costs() == []
