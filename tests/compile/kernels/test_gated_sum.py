"""gated_sum against numpy, and many tokens against one at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from emberd.compile.isa.isa import Isa
from emberd.compile.kernels.gated_sum import gated_sum, reference
from random_shapes import odd, random_shapes

COLUMNS = [6, 48, 2048, *random_shapes("gated_sum", lambda r: odd(r, 1, 300))]
TOKENS = 5


@pytest.fixture(scope="module")
def library(isa: Isa, harness: Any) -> Any:
    return harness.library(
        isa, [gated_sum(isa, columns=n, tokens=t) for n in COLUMNS for t in (1, None)]
    )


@pytest.mark.parametrize("columns", COLUMNS)
def test_many_tokens_agree_with_the_reference_and_with_one_at_a_time(
    columns: int, harness: Any, library: Any
) -> None:
    random = np.random.default_rng(columns)
    gate = (random.standard_normal((TOKENS, 1)) * 10).astype(np.float32)
    others = random.standard_normal((3, TOKENS, columns)).astype(np.float32)

    def run(rows: slice, suffix: str) -> np.ndarray:
        inputs = [harness.aligned(array[rows]) for array in (gate, *others)]
        y: np.ndarray = harness.empty(np.float32, inputs[1].shape)
        library(f"gated_sum_n{columns}_{suffix}", *inputs, y)
        return y

    together = run(slice(None), "tn")
    expected = reference(gate.astype(np.float64), *others.astype(np.float64))
    np.testing.assert_allclose(together, expected, rtol=1e-5, atol=1e-6)
    alone = [run(slice(token, token + 1), "t1") for token in range(TOKENS)]
    assert np.array_equal(together, np.concatenate(alone))
