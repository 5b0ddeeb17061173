"""In what order experts.bin holds the experts: what a class of commands wants lies together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from emberd.daemon.activation_map import ActivationMap, Expert

HOT_SHARE = 4  # one in so many of a layer's experts is a class's hot set


def expert_order(layers: int, experts: int, activation_map: ActivationMap | None) -> list[Expert]:
    """Every (layer, expert) once, in the order of their blobs.

    Without a map: layer by layer. With one: the experts that are hot for several classes, then
    those of each class, then the others; each group from the first layer to the last and within a
    layer most chosen first. So what a class wants is two runs of the file, in the order in which a
    token needs it.
    """
    if activation_map is None:
        return [(layer, expert) for layer in range(layers) for expert in range(experts)]
    found = activation_map
    classes = range(len(found.classes))
    count = -(-experts // HOT_SHARE)
    hot = {
        index: {
            (layer, expert)
            for layer in range(layers)
            for expert in found.ranking(layer, index)[:count]
        }
        for index in classes
    }
    owners = Counter(expert for members in hot.values() for expert in members)
    several = {expert for expert, number in owners.items() if number > 1}
    groups: list[tuple[set[Expert], int | None]] = [(several, None)]
    groups += [(hot[index] - several, index) for index in classes]
    groups += [({(layer, expert) for layer in range(layers) for expert in range(experts)}, None)]
    order: dict[Expert, None] = {}
    for members, index in groups:
        for layer in range(layers):
            ranking = found.ranking(layer, index)
            order.update(dict.fromkeys((layer, e) for e in ranking if (layer, e) in members))
    return list(order)


def bank_indices(order: Sequence[Expert], layers: int) -> list[np.ndarray]:
    """Each layer's table i32[experts]: which blob is which expert."""
    tables = np.empty((layers, len(order) // layers), np.int32)
    for blob, (layer, expert) in enumerate(order):
        tables[layer, expert] = blob
    return list(tables)
