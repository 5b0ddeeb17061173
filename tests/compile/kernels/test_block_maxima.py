"""block_maxima against numpy, and many tokens against one at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from emberd.compile.isa.isa import Isa
from emberd.compile.kernels.block_maxima import block_maxima, reference
from random_shapes import odd, random_shapes

SIZES = [(1, 64), (64, 64), (63, 64), (300, 64), (999, 7), (50000, 64)]  # columns, block
SIZES += random_shapes("block_maxima", lambda r: (odd(r, 1, 2000), r.randint(1, 70)))
TOKENS = 5


@pytest.fixture(scope="module")
def library(isa: Isa, harness: Any) -> Any:
    return harness.library(
        isa,
        [block_maxima(isa, columns=n, block=b, tokens=t) for n, b in SIZES for t in (1, None)],
    )


@pytest.mark.parametrize(("columns", "block"), SIZES)
def test_the_greatest_of_every_block(columns: int, block: int, harness: Any, library: Any) -> None:
    random = np.random.default_rng(columns)
    x = random.standard_normal((TOKENS, columns)).astype(np.float32)
    x[random.random(x.shape) < 0.1] = np.nan
    x[random.random(x.shape) < 0.1] = -np.inf
    x[0, :block], x[1, -block:], x[2, columns // 2] = np.nan, -np.inf, np.inf

    def run(rows: slice, suffix: str) -> np.ndarray:
        source = harness.aligned(x[rows])
        maxima: np.ndarray = harness.empty(np.float32, (len(source), -(-columns // block)))
        library(f"block_maxima_n{columns}_b{block}_{suffix}", source, maxima)
        return maxima

    expected = reference(x, block)
    np.testing.assert_array_equal(run(slice(None), "tn"), expected)
    alone = [run(slice(token, token + 1), "t1") for token in range(TOKENS)]
    np.testing.assert_array_equal(np.concatenate(alone), expected)
