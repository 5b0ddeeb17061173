"""gated_delta_rule against numpy in float64, with its state carried from chunk to chunk."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from emberd.compile.isa.isa import Isa
from emberd.compile.kernels.gated_delta_rule import (
    gated_delta_rule,
    gated_delta_rule_scratch,
    reference,
)
from random_shapes import odd, random_shapes

DIMENSIONS = ("key_heads", "value_heads", "key_dim", "value_dim")
CASES = [(1, 3, 5, 7), (2, 4, 8, 8), (2, 2, 24, 40), (1, 2, 32, 128)]
CASES += random_shapes(
    "gated_delta_rule",
    lambda r: (
        (heads := r.randint(1, 3)),
        heads * r.randint(1, 4),
        odd(r, 3, 60),
        r.choice([odd(r, 3, 60), 16 * r.randint(1, 9)]),
    ),
)
TOKENS = 11
CHUNKS = [[11], [1] * 11, [3, 1, 7], [1, 8, 2]]


@pytest.fixture(scope="module")
def library(isa: Isa, harness: Any) -> Any:
    return harness.library(
        isa,
        [
            gated_delta_rule(isa, **dict(zip(DIMENSIONS, case, strict=True)), tokens=tokens)
            for case in CASES
            for tokens in (1, None)
        ],
    )


class Problem:
    """Random inputs; the gates reach from forgetting everything to keeping everything."""

    def __init__(self, case: tuple[int, int, int, int], harness: Any, library: Any) -> None:
        self._harness, self._library = harness, library
        self.dimensions = dict(zip(DIMENSIONS, case, strict=True))
        key_heads, heads, key_dim, value_dim = case
        self._name = f"gated_delta_rule_hk{key_heads}_hv{heads}_dk{key_dim}_dv{value_dim}"
        random = np.random.default_rng(key_dim)

        def normal(*shape: int) -> np.ndarray:
            return random.standard_normal(shape).astype(np.float32)

        self.qkv = normal(TOKENS, 2 * key_heads * key_dim + heads * value_dim)
        self.b, self.a = 4 * normal(TOKENS, heads), 8 * normal(TOKENS, heads)
        self.a[0, 0], self.a[1, 0] = 100.0, -100.0
        self.a_log, self.dt_bias = normal(heads), normal(heads)
        self.state = normal(heads, key_dim, value_dim)

    def run(self, chunks: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Outputs of all tokens and the last state."""
        aligned = self._harness.aligned
        state, a_log, dt_bias = (aligned(x) for x in (self.state, self.a_log, self.dt_bias))
        parts, first = [], 0
        for length in chunks:
            rows = slice(first, first + length)
            first += length
            qkv, b, a = (aligned(x[rows]) for x in (self.qkv, self.b, self.a))
            columns = self.dimensions["value_heads"] * self.dimensions["value_dim"]
            parts.append(self._harness.empty(np.float32, (length, columns)))
            scratch = self._harness.scratch(gated_delta_rule_scratch(length, **self.dimensions))
            symbol = f"{self._name}_{'t1' if length == 1 else 'tn'}"
            self._library(symbol, qkv, b, a, a_log, dt_bias, state, parts[-1], *scratch)
        return np.concatenate(parts), state

    def expected(self) -> tuple[np.ndarray, np.ndarray]:
        inputs = (self.qkv, self.b, self.a, self.a_log, self.dt_bias, self.state)
        key_heads = self.dimensions["key_heads"]
        return reference(*(x.astype(np.float64) for x in inputs), key_heads=key_heads)


@pytest.fixture(params=CASES, ids=str)
def problem(request: pytest.FixtureRequest, harness: Any, library: Any) -> Problem:
    return Problem(request.param, harness, library)


def test_agrees_with_the_reference(problem: Problem) -> None:
    for result, expected in zip(problem.run([TOKENS]), problem.expected(), strict=True):
        scale = np.abs(expected).max()
        np.testing.assert_allclose(result / scale, expected / scale, rtol=0, atol=1e-6)


def test_every_chunking_gives_the_same_bits(problem: Problem) -> None:
    out, state = problem.run(CHUNKS[0])
    for chunks in CHUNKS[1:]:
        other_out, other_state = problem.run(chunks)
        assert np.array_equal(out, other_out)
        assert np.array_equal(state, other_state)
