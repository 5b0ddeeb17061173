"""Shapes that nobody chose, for the tests of kernels: the same ones in every run."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TypeVar

Shape = TypeVar("Shape")


def random_shapes(
    kernel: str, draw: Callable[[random.Random], Shape], count: int = 2
) -> list[Shape]:
    """`count` different shapes; the name of the kernel is the seed."""
    generator = random.Random(kernel)
    found: dict[Shape, None] = {}
    while len(found) < count:
        found[draw(generator)] = None
    return list(found)


def odd(generator: random.Random, low: int, high: int) -> int:
    """An odd number from low to high."""
    return generator.randrange(low | 1, high + 1, 2)
