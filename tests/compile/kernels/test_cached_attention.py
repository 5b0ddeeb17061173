"""cached_attention against numpy in float64; unwritten cache rows are NaN: reading them shows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from emberd.compile.isa.isa import Isa
from emberd.compile.kernels.cached_attention import (
    SLOTS,
    SPLIT,
    CacheType,
    cached_attention,
    cached_attention_scratch,
    reference,
)

CASES: list[tuple[int, int, int, CacheType]] = [  # query heads, kv heads, head dim, cache dtype
    (1, 1, 5, "f32"),
    (4, 2, 8, "f16"),
    (6, 2, 24, "f32"),
    (8, 1, 32, "f16"),
    (16, 1, 48, "f16"),
]
NUMPY_DTYPES = {"f32": np.float32, "f16": np.float16}
TOKENS = 20
CHUNKS = [[20], [1] * 20, [1, 7, 12], [17, 1, 2]]


@pytest.fixture(scope="module")
def library(isa: Isa, harness: Any) -> Any:
    return harness.library(
        isa,
        [
            cached_attention(
                isa,
                query_heads=query_heads,
                kv_heads=kv_heads,
                head_dim=head_dim,
                cache_dtype=cache_dtype,
                tokens=tokens,
            )
            for query_heads, kv_heads, head_dim, cache_dtype in CASES
            for tokens in (1, None)
        ],
    )


class Problem:
    """Random inputs behind a cache of `past` positions."""

    def __init__(self, case: tuple[int, int, int, CacheType], harness: Any, library: Any) -> None:
        self.query_heads, self.kv_heads, self.head_dim, self.cache_dtype = case
        self.dtype: Any = NUMPY_DTYPES[self.cache_dtype]
        self._harness, self._library = harness, library

    def inputs(self, past: int, magnitude: float = 1.0) -> list[np.ndarray]:
        """query, key, value, positions, key cache, value cache."""
        random = np.random.default_rng(past)

        def normal(*shape: int) -> np.ndarray:
            return random.standard_normal(shape).astype(np.float32)

        new_shape = (TOKENS, self.kv_heads, self.head_dim)
        caches = []
        for _ in range(2):
            cache = np.full((past + TOKENS + 1, self.kv_heads, self.head_dim), np.nan, self.dtype)
            cache[:past] = normal(past, self.kv_heads, self.head_dim)
            caches.append(cache)
        query = magnitude * normal(TOKENS, self.query_heads, self.head_dim)
        positions = np.arange(past, past + TOKENS, dtype=np.int32)
        return [query, normal(*new_shape), normal(*new_shape), positions, *caches]

    def run(self, inputs: list[np.ndarray], chunks: list[int]) -> list[np.ndarray]:
        """The outputs of all tokens, and the caches."""
        caches = [self._harness.aligned(cache) for cache in inputs[4:]]
        specification = cached_attention_scratch(
            TOKENS,
            query_heads=self.query_heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            cache_dtype=self.cache_dtype,
        )
        name = f"cached_attention_{self.cache_dtype}_hq{self.query_heads}_hkv{self.kv_heads}"
        parts, first = [], 0
        for length in chunks:
            new = [self._harness.aligned(x[first : first + length]) for x in inputs[:4]]
            first += length
            shape = (length, self.query_heads * self.head_dim)
            parts.append(self._harness.empty(np.float32, shape))
            symbol = f"{name}_d{self.head_dim}_{'t1' if length == 1 else 'tn'}"
            scratch = self._harness.scratch(specification)
            self._library(symbol, *new, *caches, parts[-1], *scratch)
        return [np.concatenate(parts), *caches]

    def expected(self, inputs: list[np.ndarray]) -> tuple[np.ndarray, ...]:
        """The reference on keys and values as the cache holds them."""
        query, key, value, positions, *caches = inputs
        key, value, key_cache, value_cache = (
            x.astype(self.dtype).astype(np.float64) for x in (key, value, *caches)
        )
        wide_query = query.astype(np.float64)
        return reference(wide_query, key, value, positions, key_cache, value_cache)


@pytest.fixture(params=CASES, ids=lambda case: "-".join(map(str, case)))
def problem(request: pytest.FixtureRequest, harness: Any, library: Any) -> Problem:
    return Problem(request.param, harness, library)


@pytest.mark.parametrize("past", [0, SPLIT - 8, 2 * SPLIT])
def test_agrees_with_the_reference(problem: Problem, past: int) -> None:
    inputs = problem.inputs(past)
    out, *caches = problem.run(inputs, [TOKENS])
    expected, *expected_caches = problem.expected(inputs)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=3e-6)
    for cache, expected_cache in zip(caches, expected_caches, strict=True):
        assert np.array_equal(cache, expected_cache.astype(problem.dtype), equal_nan=True)


@pytest.mark.parametrize("past", [0, SPLIT - 8])
def test_every_chunking_gives_the_same_bits(problem: Problem, past: int) -> None:
    inputs = problem.inputs(past)
    results = problem.run(inputs, CHUNKS[0])
    for chunks in CHUNKS[1:]:
        for result, other in zip(results, problem.run(inputs, chunks), strict=True):
            assert np.array_equal(result, other, equal_nan=True)


def test_more_splits_than_slots(problem: Problem) -> None:
    """A context that decoding works through in two waves."""
    inputs = problem.inputs(SLOTS * SPLIT + 5)
    out, *_ = problem.run(inputs, [1] * TOKENS)
    np.testing.assert_allclose(out, problem.expected(inputs)[0], rtol=1e-5, atol=3e-6)
    assert np.array_equal(out, problem.run(inputs, [TOKENS])[0])


def test_large_scores_do_not_overflow(problem: Problem) -> None:
    inputs = problem.inputs(past=40, magnitude=1000.0)
    out, *_ = problem.run(inputs, [TOKENS])
    np.testing.assert_allclose(out, problem.expected(inputs)[0], rtol=1e-3, atol=1e-3)


def test_a_half_precision_cache_saturates(problem: Problem) -> None:
    inputs = problem.inputs(past=0)
    inputs[2] = inputs[2] * np.float32(1e6)
    out, _, values = problem.run(inputs, [TOKENS])
    largest = np.finfo(problem.dtype).max
    expected = np.clip(inputs[2], -largest, largest).astype(problem.dtype)
    assert np.array_equal(values[:TOKENS], expected)
    assert np.isfinite(out).all()
