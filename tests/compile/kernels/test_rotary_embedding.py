"""rotary_embedding against numpy, up to the longest context."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from emberd.compile.isa.isa import Isa
from emberd.compile.kernels.rotary_embedding import reference, rotary_embedding
from random_shapes import random_shapes

CASES = [(1, 6, 2), (3, 10, 6), (2, 8, 8), (4, 64, 16), (2, 40, 32)]  # heads, D, rotary_dim
CASES += random_shapes(
    "rotary_embedding",
    lambda r: (r.randint(1, 5), (half := r.randint(1, 40)) * 2 + r.randint(0, 9), half * 2),
)
POSITIONS = np.array([0, 1, 2, 1000, 77777, 262143], np.int32)


@pytest.fixture(scope="module")
def library(isa: Isa, harness: Any) -> Any:
    return harness.library(
        isa,
        [
            rotary_embedding(isa, heads=heads, head_dim=dim, rotary_dim=rotary_dim, tokens=tokens)
            for heads, dim, rotary_dim in CASES
            for tokens in (1, None)
        ],
    )


@pytest.mark.parametrize(("heads", "dim", "rotary_dim"), CASES)
def test_many_tokens_agree_with_the_reference_and_with_one_at_a_time(
    heads: int, dim: int, rotary_dim: int, harness: Any, library: Any
) -> None:
    tokens = len(POSITIONS)
    x = np.random.default_rng(dim).standard_normal((tokens, heads, dim)).astype(np.float32)
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float32) / rotary_dim
    inverse_frequency = harness.aligned((1e7**-exponents).astype(np.float32))

    def run(rows: slice, suffix: str) -> np.ndarray:
        inputs, positions = harness.aligned(x[rows]), harness.aligned(POSITIONS[rows])
        y: np.ndarray = harness.empty(np.float32, inputs.shape)
        symbol = f"rotary_embedding_h{heads}_d{dim}_r{rotary_dim}_{suffix}"
        library(symbol, inputs, positions, inverse_frequency, y)
        return y

    many = run(slice(None), "tn")
    expected = reference(x.astype(np.float64), POSITIONS, inverse_frequency)
    np.testing.assert_allclose(many, expected, rtol=1e-6, atol=1e-6)
    assert np.array_equal(many[..., rotary_dim:], x[..., rotary_dim:])
    single = [run(slice(token, token + 1), "t1") for token in range(tokens)]
    assert np.array_equal(many, np.concatenate(single))
