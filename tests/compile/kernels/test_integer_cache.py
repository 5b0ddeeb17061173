"""What the integers of a cache keep of vectors, and that their products fit int32."""

from __future__ import annotations

import numpy as np
import pytest
from emberd.compile.kernels.attention_splits import SPLIT
from emberd.compile.kernels.integer_cache import (
    CHUNK,
    KEY_LIMIT,
    NORM,
    VALUE_LIMIT,
    Kind,
    padded,
    reference,
    row_elements,
)

SIZES = (5, 64, 256)
INT32 = 2**31 - 1


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["key", "value"])
def test_16_bits_keep_more_than_float16(size: int, kind: Kind) -> None:
    x = np.random.default_rng(size).standard_normal((1000, size))
    error = np.abs(reference(x, bits=16, kind=kind) - x).max()
    assert error < np.abs(x.astype(np.float16) - x).max()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["key", "value"])
def test_8_bits_keep_a_127th_of_the_largest(size: int, kind: Kind) -> None:
    x = np.random.default_rng(size).standard_normal((1000, size))
    error = np.abs(reference(x, bits=8, kind=kind) - x).max(-1)
    assert (error <= np.abs(x).max(-1) / 127 * 0.5000001).all()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bits", [8, 16])
def test_zeros_and_outliers(size: int, bits: int) -> None:
    x = np.zeros((2, size))
    x[1, 0] = 1e6
    for kind in ("query", "key", "value"):
        np.testing.assert_allclose(reference(x, bits=bits, kind=kind), x, rtol=1e-12)


@pytest.mark.parametrize("size", SIZES)
def test_products_fit(size: int) -> None:
    """Of a query and a key at their bounds, and of a split's weights and values."""
    rounded = NORM + 0.5 * np.sqrt(size)
    assert rounded**2 <= INT32
    assert rounded * KEY_LIMIT[8] * np.sqrt(size) <= INT32
    for limit in VALUE_LIMIT.values():
        assert (INT32 / limit - SPLIT + SPLIT / 2) * limit <= INT32


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bits", [8, 16])
def test_a_chunk_of_a_head_is_whole_cache_lines(size: int, bits: int) -> None:
    assert padded(size) % CHUNK == 0
    assert CHUNK * row_elements(size, bits) * bits // 8 % 64 == 0
