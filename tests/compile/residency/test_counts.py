"""What is counted of routing, against counting one by one."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from emberd.compile.residency.counts import RoutingCounts
from emberd.daemon.activation_map import SUCCESSORS, ActivationMap

LAYERS, EXPERTS, TOP_K = 3, 12, 4
COMMANDS = (("media", 5), ("climate", 1), ("media", 9), ("climate", 30))


def random_ids(tokens: int, seed: int) -> np.ndarray:
    """[tokens, layers, top_k], the lower experts chosen more often."""
    draw = np.random.default_rng(seed)
    keys = draw.random((tokens, LAYERS, EXPERTS)) + np.linspace(0, 1, EXPERTS)
    return np.argsort(keys, axis=-1)[..., :TOP_K]


def counted() -> RoutingCounts:
    counts = RoutingCounts(LAYERS, EXPERTS, TOP_K)
    for seed, (name, tokens) in enumerate(COMMANDS):
        counts.add(name, random_ids(tokens, seed))
    return counts


def test_classes_hold_how_often_each_expert_was_chosen() -> None:
    found = counted().to_map("ab" * 32)
    assert [(c.name, c.commands, c.tokens) for c in found.classes] == [
        ("climate", 2, 31),
        ("media", 2, 14),
    ]
    for entry in found.classes:
        expected: Counter[tuple[int, int]] = Counter()
        for seed, (name, tokens) in enumerate(COMMANDS):
            for token in random_ids(tokens, seed) if name == entry.name else ():
                expected.update((i, int(e)) for i, chosen in enumerate(token) for e in chosen)
        for layer in range(LAYERS):
            for expert in range(EXPERTS):
                assert entry.choices[layer * EXPERTS + expert] == expected[layer, expert]
    assert ActivationMap.from_bytes(found.to_bytes()) == found


@pytest.mark.parametrize("which", ["next_token", "next_layer"])
def test_transitions_are_the_likeliest_successors(which: str) -> None:
    followed: Counter[tuple[int, int, int]] = Counter()
    chosen: Counter[tuple[int, int]] = Counter()
    for seed, (_, tokens) in enumerate(COMMANDS):
        ids = random_ids(tokens, seed)
        rows = (
            [(i, a[i], b[i]) for a, b in pairwise(ids) for i in range(LAYERS)]
            if which == "next_token"
            else [(i, token[i], token[i + 1]) for token in ids for i in range(LAYERS - 1)]
        )
        for layer, before, after in rows:
            chosen.update((layer, int(a)) for a in before)
            followed.update((layer, int(a), int(b)) for a in before for b in after)
    table = getattr(counted().to_map("ab" * 32), which)
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            times = chosen[layer, expert]
            shares = [followed[layer, expert, b] / max(times, 1) for b in range(EXPERTS)]
            best = sorted(range(EXPERTS), key=lambda b, shares=shares: -shares[b])[:SUCCESSORS]
            found = table.after(layer, expert)
            assert [b for b, _ in found] == [b for b in best if shares[b] > 0]
            assert [s for _, s in found] == pytest.approx(
                [shares[b] for b in best if shares[b] > 0], abs=1e-5
            )


def test_counts_come_back_from_their_arrays() -> None:
    counts = counted()
    restored = RoutingCounts(LAYERS, EXPERTS, TOP_K)
    restored.restore(counts.arrays())
    for both in (counts, restored):
        both.add("navigation", random_ids(3, 9))
    assert restored.to_map("ab" * 32) == counts.to_map("ab" * 32)


def test_nothing_counted_comes_back_too() -> None:
    restored = RoutingCounts(LAYERS, EXPERTS, TOP_K)
    restored.restore(RoutingCounts(LAYERS, EXPERTS, TOP_K).arrays())
    assert restored.classes == {}
