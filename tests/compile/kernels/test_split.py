"""split against numpy, of any number of rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from emberd.compile.isa.isa import Isa
from emberd.compile.kernels.split import reference, split
from random_shapes import odd, random_shapes

WIDTHS = [(256, 256), (6, 10), (16, 32, 48), (1, 3)]
WIDTHS += random_shapes("split", lambda r: tuple(odd(r, 1, 99) for _ in range(r.randint(2, 4))))


@pytest.fixture(scope="module")
def library(isa: Isa, harness: Any) -> Any:
    return harness.library(isa, [split(isa, widths=w, rows=r) for w in WIDTHS for r in (1, None)])


@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("rows", [1, 2, 33])
def test_split(widths: tuple[int, ...], rows: int, harness: Any, library: Any) -> None:
    x = np.random.default_rng(rows).standard_normal((rows, sum(widths))).astype(np.float32)
    parts = [harness.empty(np.float32, (rows, width)) for width in widths]
    name = "split_" + "_".join(f"n{width}" for width in widths)
    library(f"{name}_{'t1' if rows == 1 else 'tn'}", harness.aligned(x), *parts)
    for part, expected in zip(parts, reference(x, widths=widths), strict=True):
        assert np.array_equal(part, expected)
