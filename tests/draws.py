"""Drawing a token by definition: sort the whole vocabulary, filter, walk along the masses."""

from __future__ import annotations

import math
from collections.abc import Sequence

from emberd.daemon.errors import NoFiniteLogits


def kept(
    values: Sequence[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> list[tuple[int, float]]:
    """The tokens that top-k, then top-p, then min-p leave, descending, with their masses; all of
    them by their ids, where there is no filter.

    Raises NoFiniteLogits where the greatest is not finite.
    """
    order = [i for i, value in enumerate(values) if not math.isnan(value)]
    best = max((values[i] for i in order), default=math.nan)
    if top_k or top_p < 1 or min_p:
        order.sort(key=lambda i: (-values[i], i))
    if top_k:
        order = order[:top_k]
    if not math.isfinite(best):
        raise NoFiniteLogits
    weights = [math.exp((values[i] - best) / temperature) for i in order]
    whole, mass, count = math.fsum(weights), 0.0, 0
    while count < len(order) and (top_p == 1 or count == 0 or mass < top_p * whole):
        mass += weights[count]
        count += 1
    return [
        (i, weight) for i, weight in zip(order[:count], weights, strict=False) if weight >= min_p
    ]


def draw(
    values: Sequence[float],
    uniform: float,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    tolerance: float = 0.0,
) -> list[int]:
    """The token at `uniform`; with a tolerance, also those that begin or end within it."""
    if temperature == 0:
        top_k, temperature = 1, 1.0
    tokens = kept(values, temperature, top_k, top_p, min_p)
    total = math.fsum(weight for _, weight in tokens)
    found, before = [], 0.0
    for token, weight in tokens:
        after = before + weight / total
        if before - tolerance <= uniform < after + tolerance:
            found.append(token)
        before = after
    return found or [tokens[-1][0]]
