"""Activation maps for tests."""

from __future__ import annotations

import random
from array import array

from emberd.daemon.activation_map import (
    SUCCESSORS,
    ActivationMap,
    CommandClass,
    Transitions,
)


def random_map(
    layers: int = 3,
    experts: int = 8,
    top_k: int = 2,
    classes: tuple[str, ...] = ("navigation", "climate"),
    model: str = "ab" * 32,
    tokens: int = 50,
    seed: int = 0,
) -> ActivationMap:
    """A map of `tokens` random tokens a class, the skew of each class and layer drawn anew."""
    draw = random.Random(seed)
    counted = []
    for number, name in enumerate(classes):
        choices = []
        for _ in range(layers):
            likely = draw.sample(range(experts), experts)
            row = [0] * experts
            for _ in range(tokens):
                chosen: set[int] = set()
                while len(chosen) < top_k:
                    chosen.add(likely[int(draw.random() ** 3 * experts)])
                for expert in chosen:
                    row[expert] += 1
            choices += row
        counted.append(CommandClass(name, 10 + number, tokens, array("I", choices)))
    return ActivationMap(
        model,
        layers,
        experts,
        top_k,
        tuple(counted),
        *(_random_transitions(draw, layers, experts),) * 2,
    )


def _random_transitions(draw: random.Random, layers: int, experts: int) -> Transitions:
    """Two successors of every expert."""
    unused = [0] * (SUCCESSORS - 2)
    successors, shares = array("H"), array("H")
    for _ in range(layers * experts):
        successors.extend([*draw.sample(range(experts), 2), *unused])
        likely, less = sorted((draw.randrange(1, 65536), draw.randrange(1, 65536)), reverse=True)
        shares.extend([likely, less, *unused])
    return Transitions(experts, successors, shares)
