"""Drawing from a row of logits, against the definition."""

from __future__ import annotations

import ctypes
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
from draws import draw
from emberd.daemon.bindings import Row, core

# Whole classes are weighed in float32: a number nearer than this to a token's edge may miss it.
TOLERANCE = 1e-6


def _drawn(values: Sequence[float], uniform: float, **settings: Any) -> int:
    chosen = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **settings}
    logits = (ctypes.c_float * len(values))(*values)
    row = Row(ctypes.addressof(logits), None, len(values))
    token: int = core.ember_draw(row, uniform, *chosen.values())
    return token


def _values(count: int, spread: float, seed: int = 5) -> list[float]:
    """float32 values with ties, and some that no token may come of."""
    rng = random.Random(seed)
    values = [ctypes.c_float(rng.gauss(0, spread)).value for _ in range(count)]
    for i in range(0, count - 3, 17):
        values[i : i + 3] = [values[i + 1], values[i + 1], rng.choice([-math.inf, math.nan])]
    return values


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.3},
        {"temperature": 1.7},
        {"top_k": 1},
        {"top_k": 5},
        {"top_k": 400, "top_p": 0.9, "temperature": 1.5},
        {"top_k": 10**6},
        {"top_p": 0.6},
        {"top_p": 0.0},
        {"min_p": 0.2},
        {"min_p": 1.0},
        {"min_p": 1e-20},
        {"top_k": 20, "top_p": 0.8, "min_p": 0.1, "temperature": 0.7},
        {"top_k": 500, "top_p": 0.8, "min_p": 0.1, "temperature": 0.7},
        {"top_p": 0.97, "min_p": 0.01, "temperature": 1.4},
    ],
    ids=str,
)
@pytest.mark.parametrize(("count", "spread"), [(1, 1.0), (63, 1.0), (700, 0.3), (700, 4.0)])
def test_the_draw_is_that_of_the_definition(
    settings: dict[str, Any], count: int, spread: float
) -> None:
    values, rng = _values(count, spread), random.Random(1)
    for uniform in [0.0, *(rng.random() for _ in range(20)), math.nextafter(1.0, 0.0)]:
        assert _drawn(values, uniform, **settings) in draw(
            values, uniform, **settings, tolerance=TOLERANCE
        )


@pytest.mark.parametrize("settings", [{}, {"top_p": 0.5}, {"top_k": 600}, {"min_p": 0.5}], ids=str)
def test_equal_logits_are_drawn_in_order(settings: dict[str, Any]) -> None:
    for uniform in (0.0001, 0.3333, 0.9999):
        assert [_drawn([2.5] * 1000, uniform, **settings)] == draw(
            [2.5] * 1000, uniform, **settings
        )


@pytest.mark.parametrize("temperature", [5e-324, 1e-308, 1e-40, 1e-3])
@pytest.mark.parametrize("top_k", [0, 5])
def test_hardly_any_temperature_takes_the_greatest(temperature: float, top_k: int) -> None:
    assert _drawn([1.0, 3.0, 2.0], 0.999, temperature=temperature, top_k=top_k) == 1


@pytest.mark.parametrize("temperature", [1e38, 1e300, math.inf])
@pytest.mark.parametrize(("top_k", "order"), [(0, [0, 1, 2]), (3, [1, 2, 0])])
def test_any_temperature_keeps_the_order(temperature: float, top_k: int, order: list[int]) -> None:
    values = [1.0, 3.0, 2.0]
    drawn = [_drawn(values, u, temperature=temperature, top_k=top_k) for u in (0.1, 0.5, 0.9)]
    assert drawn == order


def test_far_less_likely_tokens_are_left_out() -> None:
    values = [0.0] * 300
    values[7] = 100.0
    assert _drawn(values, math.nextafter(1.0, 0.0)) == 7
    assert _drawn(values, math.nextafter(1.0, 0.0), top_k=290) == 7
