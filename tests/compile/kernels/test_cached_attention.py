"""cached_attention against numpy in float64; unwritten cache rows are NaN: reading them shows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from emberd.compile.isa.isa import Isa
from emberd.compile.kernels.attention_splits import SLOTS, SPLIT
from emberd.compile.kernels.cached_attention import (
    cached_attention,
    cached_attention_scratch,
    reference,
)
from random_shapes import odd, random_shapes

DIMENSIONS = ("query_heads", "kv_heads", "head_dim")
CASES = [(1, 1, 5), (4, 2, 8), (6, 2, 24), (8, 1, 32), (16, 1, 48)]
CASES += random_shapes(
    "cached_attention",
    lambda r: ((heads := r.randint(1, 3)) * r.randint(1, 8), heads, odd(r, 3, 70)),
)
TOKENS = 20
CHUNKS = [[20], [1] * 20, [1, 7, 12], [17, 1, 2]]


@pytest.fixture(scope="module")
def library(isa: Isa, harness: Any) -> Any:
    return harness.library(
        isa,
        [
            cached_attention(isa, **dict(zip(DIMENSIONS, case, strict=True)), tokens=tokens)
            for case in CASES
            for tokens in (1, None)
        ],
    )


class Problem:
    """Random inputs behind a cache of `past` positions."""

    def __init__(self, case: tuple[int, int, int], harness: Any, library: Any) -> None:
        self._case = case
        self.query_heads, self.kv_heads, self.head_dim = case
        self._harness, self._library = harness, library

    def inputs(self, past: int, magnitude: float = 1.0) -> list[np.ndarray]:
        """query, key, value, positions, key cache, value cache."""
        random = np.random.default_rng(past)

        def normal(*shape: int) -> np.ndarray:
            return random.standard_normal(shape).astype(np.float32)

        new_shape = (TOKENS, self.kv_heads, self.head_dim)
        caches = []
        for _ in range(2):
            cache = np.full((past + TOKENS + 1, self.kv_heads, self.head_dim), np.nan, np.float32)
            cache[:past] = normal(past, self.kv_heads, self.head_dim)
            caches.append(cache)
        query = magnitude * normal(TOKENS, self.query_heads, self.head_dim)
        positions = np.arange(past, past + TOKENS, dtype=np.int32)
        return [query, normal(*new_shape), normal(*new_shape), positions, *caches]

    def run(self, inputs: list[np.ndarray], chunks: list[int]) -> list[np.ndarray]:
        """The outputs of all tokens, and the caches."""
        caches = [self._harness.aligned(cache) for cache in inputs[4:]]
        dimensions = dict(zip(DIMENSIONS, self._case, strict=True))
        name = f"cached_attention_hq{self.query_heads}_hkv{self.kv_heads}"
        parts, first = [], 0
        for length in chunks:
            new = [self._harness.aligned(x[first : first + length]) for x in inputs[:4]]
            first += length
            shape = (length, self.query_heads * self.head_dim)
            parts.append(self._harness.empty(np.float32, shape))
            symbol = f"{name}_d{self.head_dim}_{'t1' if length == 1 else 'tn'}"
            scratch = self._harness.scratch(cached_attention_scratch(length, **dimensions))
            self._library(symbol, *new, *caches, parts[-1], *scratch)
        return [np.concatenate(parts), *caches]

    def expected(self, inputs: list[np.ndarray]) -> tuple[np.ndarray, ...]:
        query, key, value, positions, *caches = inputs
        wide = [x.astype(np.float64) for x in (query, key, value)]
        return reference(*wide, positions, *(x.astype(np.float64) for x in caches))


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
        assert np.array_equal(cache, expected_cache.astype(np.float32), equal_nan=True)


@pytest.mark.parametrize("past", [0, SPLIT - 8])
def test_every_chunking_gives_the_same_bits(problem: Problem, past: int) -> None:
    inputs = problem.inputs(past)
    results = problem.run(inputs, CHUNKS[0])
    for chunks in CHUNKS[1:]:
        for result, other in zip(results, problem.run(inputs, chunks), strict=True):
            assert np.array_equal(result, other, equal_nan=True)


def test_more_splits_than_slots(problem: Problem) -> None:
    """A context that decoding goes through in two waves."""
    inputs = problem.inputs(SLOTS * SPLIT + 5)
    out, *_ = problem.run(inputs, [1] * TOKENS)
    np.testing.assert_allclose(out, problem.expected(inputs)[0], rtol=1e-5, atol=3e-6)
    assert np.array_equal(out, problem.run(inputs, [TOKENS])[0])


def test_large_scores_do_not_overflow(problem: Problem) -> None:
    inputs = problem.inputs(past=40, magnitude=1000.0)
    out, *_ = problem.run(inputs, [TOKENS])
    np.testing.assert_allclose(out, problem.expected(inputs)[0], rtol=1e-3, atol=1e-3)
