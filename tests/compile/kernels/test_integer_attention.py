"""integer_attention against numpy in float64, on keys and values as the cache holds them.

The cache begins as what is no number anywhere: reading before writing shows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from emberd.compile.isa.isa import Isa
from emberd.compile.kernels.attention_splits import SLOTS, SPLIT
from emberd.compile.kernels.cached_attention import reference
from emberd.compile.kernels.integer_attention import (
    integer_attention,
    integer_attention_scratch,
)
from emberd.compile.kernels.integer_cache import reference as as_cached
from emberd.compile.kernels.integer_cache import row_elements
from random_shapes import odd, random_shapes

DIMENSIONS = ("query_heads", "kv_heads", "head_dim", "bits")
CASES = [(1, 1, 5, 16), (6, 2, 24, 8), (6, 2, 24, 16), (8, 1, 32, 8), (16, 1, 48, 16)]
CASES += random_shapes(
    "integer_attention",
    lambda r: ((heads := r.randint(1, 3)) * r.randint(1, 8), heads, odd(r, 3, 70), 8),
    count=1,
)
CASES += random_shapes(
    "integer_attention of 16 bits",
    lambda r: ((heads := r.randint(1, 3)) * odd(r, 1, 9), heads, 8 * r.randint(1, 12), 16),
    count=1,
)
TOKENS = 20
CHUNKS = [[1] * TOKENS, [1, 7, 12], [17, 1, 2]]
LARGEST_CONTEXT = SLOTS * SPLIT + 5 + TOKENS  # that decoding goes through in two waves


@pytest.fixture(scope="module")
def library(isa: Isa, harness: Any) -> Any:
    return harness.library(
        isa,
        [
            integer_attention(isa, **dict(zip(DIMENSIONS, case, strict=True)), tokens=tokens)
            for case in CASES
            for tokens in (1, None)
        ],
    )


class Problem:
    """A conversation of random queries, keys and values."""

    def __init__(self, case: tuple[int, int, int, int], harness: Any, library: Any) -> None:
        self.dimensions = dict(zip(DIMENSIONS, case, strict=True))
        query_heads, kv_heads, head_dim, self.bits = case
        self._harness, self._library = harness, library
        self._name = f"integer_attention_i{self.bits}_hq{query_heads}_hkv{kv_heads}_d{head_dim}"
        random = np.random.default_rng(head_dim)
        self.query, self.key, self.value = (
            random.standard_normal((LARGEST_CONTEXT, heads, head_dim)).astype(np.float32)
            for heads in (query_heads, kv_heads, kv_heads)
        )

    def run(self, context: int, chunks: list[int]) -> np.ndarray:
        """The outputs of the tokens after `context` others, which are taken in one chunk."""
        _query_heads, kv_heads, head_dim = self.query[0].shape[0], *self.key.shape[1:]
        shape = (-(-LARGEST_CONTEXT // 64) * 64, kv_heads, row_elements(head_dim, self.bits))
        no_number = np.full(shape, -1, f"int{self.bits}")
        caches = [self._harness.aligned(no_number) for _ in range(2)]
        parts, first = [], 0
        for length in [context, *chunks] if context else chunks:
            rows = slice(first, first + length)
            positions = np.arange(first, first + length, dtype=np.int32)
            first += length
            inputs = [x[rows] for x in (self.query, self.key, self.value)] + [positions]
            out = self._harness.empty(np.float32, (length, self.query[0].size))
            scratch = self._harness.scratch(integer_attention_scratch(length, **self.dimensions))
            symbol = f"{self._name}_{'t1' if length == 1 else 'tn'}"
            self._library(symbol, *map(self._harness.aligned, inputs), *caches, out, *scratch)
            parts.append(out)
        return np.concatenate(parts)[context:]

    def expected(self, context: int) -> np.ndarray:
        """The reference on keys and values as the cache holds them."""
        rows = slice(context, context + TOKENS)
        key, value = (
            as_cached(x[: context + TOKENS].astype(np.float64), bits=self.bits, kind=kind)
            for x, kind in ((self.key, "key"), (self.value, "value"))
        )
        positions = np.arange(context, context + TOKENS, dtype=np.int32)
        query = self.query[rows].astype(np.float64)
        return reference(query, key[rows], value[rows], positions, key, value)[0]


@pytest.fixture(params=CASES, ids=lambda case: "-".join(map(str, case)))
def problem(request: pytest.FixtureRequest, harness: Any, library: Any) -> Problem:
    return Problem(request.param, harness, library)


@pytest.mark.parametrize("context", [0, SPLIT - 8, SLOTS * SPLIT + 5])
def test_agrees_with_the_reference(problem: Problem, context: int) -> None:
    """Within the rounding of queries: 7 standard deviations of a score, times the values."""
    out = problem.run(context, [TOKENS])
    np.testing.assert_allclose(out, problem.expected(context), rtol=0, atol=5e-4)


@pytest.mark.parametrize("context", [0, SPLIT - 8, SLOTS * SPLIT + 5])
def test_every_chunking_gives_the_same_bits(problem: Problem, context: int) -> None:
    out = problem.run(context, [TOKENS])
    for chunks in CHUNKS:
        assert np.array_equal(out, problem.run(context, chunks))


@pytest.mark.parametrize(("queries", "values"), [(1e4, 1.0), (1.0, 1e30), (0.0, 0.0)])
def test_any_magnitude(problem: Problem, queries: float, values: float) -> None:
    """Softmax weights of one position, sums near int32, and vectors of nothing."""
    problem.query *= np.float32(queries)
    problem.key *= np.float32(queries)
    problem.value *= np.float32(values)
    out, expected = problem.run(SPLIT - 8, [TOKENS]), problem.expected(SPLIT - 8)
    scale = max(values, 1.0)
    np.testing.assert_allclose(out / scale, expected / scale, rtol=0, atol=2e-3)


def test_equal_vectors_fill_the_sums(problem: Problem) -> None:
    """Every product of a split adds to the same sums, up to what int32 holds."""
    problem.query[:], problem.key[:], problem.value[:] = 1.0, 1.0, -1.0
    assert np.allclose(problem.run(2 * SPLIT, [TOKENS]), -1.0, rtol=0, atol=1e-4)
