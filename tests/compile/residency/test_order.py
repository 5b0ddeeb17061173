"""The order of experts.bin: every expert once, hot sets together."""

from __future__ import annotations

from itertools import groupby

import numpy as np
import pytest
from activation_maps import random_map
from emberd.compile.residency.order import bank_indices, expert_order

EVERY = [(layer, expert) for layer in range(3) for expert in range(8)]
MAP = random_map(3, 8, 2, ("navigation", "climate", "media"))


def test_without_a_map_experts_lie_layer_by_layer() -> None:
    assert expert_order(3, 8, None) == EVERY


def test_every_expert_has_one_place() -> None:
    order = expert_order(3, 8, MAP)
    assert sorted(order) == EVERY
    tables = bank_indices(order, 3)
    assert sorted(np.concatenate(tables)) == list(range(24))
    assert all(order[tables[layer][expert]] == (layer, expert) for layer, expert in EVERY)


@pytest.mark.parametrize("index", range(3))
def test_the_hot_set_of_a_class_is_two_runs_each_in_the_order_of_layers(index: int) -> None:
    hot = {(layer, expert) for layer in range(3) for expert in MAP.ranking(layer, index)[:2]}
    others = [
        {(layer, expert) for layer in range(3) for expert in MAP.ranking(layer, other)[:2]}
        for other in range(3)
        if other != index
    ]
    order = expert_order(3, 8, MAP)
    own = hot - others[0] - others[1]
    shared = hot - own
    places = [order.index(expert) for expert in order if expert in own]
    assert places == list(range(places[0], places[0] + len(own)))
    several = (hot & others[0]) | (hot & others[1]) | (others[0] & others[1])
    assert set(order[: len(several)]) == several >= shared
    layers = [layer for layer, _ in order[places[0] : places[0] + len(own)]]
    assert layers == sorted(layers)
    for layer, run in groupby(order[places[0] : places[0] + len(own)], key=lambda e: e[0]):
        ranks = [MAP.ranking(layer, index).index(expert) for _, expert in run]
        assert ranks == sorted(ranks)
