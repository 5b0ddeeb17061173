"""The daemon follows the policies that it can, and says so of the others."""

from __future__ import annotations

from dataclasses import replace

import pytest
from emberd.daemon.errors import EmberdError
from emberd.daemon.policies import DEFAULT, POLICIES, followed


@pytest.mark.parametrize(
    ("name", "needs"),
    [
        ("lru", ""),
        ("global-pinned", "map"),
        ("map-pinned", "map"),
        ("global-warmed", "map"),
        ("map-warmed", "map"),
        ("predictor-retained", "tokens"),
        ("pinned-retained", "map, tokens"),
        ("read-ahead", "tokens"),
        ("layer-ahead", "next layer"),
        ("map-layer-ahead", "map, next layer"),
    ],
)
def test_policies_of_the_daemon(name: str, needs: str) -> None:
    policy = followed(name)
    assert policy is POLICIES[name]
    assert policy.needs_map == needs.startswith("map")
    assert policy.needs_predictor == needs.removeprefix("map").removeprefix(", ")


@pytest.mark.parametrize("name", [name for name, policy in POLICIES.items() if policy.needs_map])
def test_what_is_left_without_a_map_does_all_but_what_needs_one(name: str) -> None:
    left = replace(POLICIES[name], name="", pinned=0.0, warmed=False, by_class=False)
    assert left == replace(POLICIES[POLICIES[name].without_map], name="")


def test_no_name_is_the_default() -> None:
    assert followed("") is DEFAULT


def test_a_policy_of_simulate_alone() -> None:
    with pytest.raises(EmberdError, match=r"only emberc simulate has the policy belady; .* lru, "):
        followed("belady")


def test_an_unknown_policy_names_the_known_ones() -> None:
    with pytest.raises(
        EmberdError, match=r"unknown policy 'fifo'; .* lru, .*read-ahead, .*layer-ahead$"
    ):
        followed("fifo")
