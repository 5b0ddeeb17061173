"""How much of what the commands of a class choose its hot experts cover."""

from __future__ import annotations

from statistics import mean

from emberd.compile.residency.order import HOT_SHARE
from emberd.daemon.activation_map import ActivationMap


def coverage(activation_map: ActivationMap, command_class: int | None) -> float:
    """Share of a class's choices that go to the most chosen quarter of each layer's experts, by
    the map's own counts; None: of any command's."""
    count = -(-activation_map.experts // HOT_SHARE)
    layers = range(activation_map.layers)
    return mean(activation_map.coverage(count, layer, command_class) for layer in layers)


def coverage_table(activation_map: ActivationMap) -> str:
    """A line a class, and one of any command."""
    lines = ["choices that the most chosen quarter of the experts covers:"]
    shares = [
        (entry.name, coverage(activation_map, index))
        for index, entry in enumerate(activation_map.classes)
    ]
    shares.append(("any command", coverage(activation_map, None)))
    width = max(len(name) for name, _ in shares)
    lines += [f"  {name:<{width}}  {share:6.1%}" for name, share in shares]
    return "\n".join(lines)
