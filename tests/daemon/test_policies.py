"""The daemon follows policies that need no predictor of tokens, and says so of the others."""

from __future__ import annotations

import pytest
from emberd.daemon.errors import EmberdError
from emberd.daemon.policies import DEFAULT, POLICIES, followed


@pytest.mark.parametrize(
    "name",
    [
        *("lru", "global-pinned", "map-pinned", "global-warmed", "map-warmed"),
        *("layer-ahead", "map-layer-ahead"),
    ],
)
def test_policies_of_the_daemon(name: str) -> None:
    assert followed(name) is POLICIES[name]
    assert POLICIES[name].needs_map == (name not in ("lru", "layer-ahead"))


def test_no_name_is_the_default() -> None:
    assert followed("") is DEFAULT


@pytest.mark.parametrize("name", ["predictor-retained", "read-ahead", "belady"])
def test_policies_of_simulate_alone(name: str) -> None:
    with pytest.raises(EmberdError, match=f"only emberc simulate has the policy {name}; .* lru, "):
        followed(name)


def test_an_unknown_policy_names_the_known_ones() -> None:
    with pytest.raises(
        EmberdError,
        match=r"unknown policy 'fifo'; .* lru, .*map-warmed, layer-ahead, map-layer-ahead$",
    ):
        followed("fifo")
