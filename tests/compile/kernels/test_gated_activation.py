"""gated_activation against numpy, for values from far below to far above the linear range."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from emberd.compile.isa.isa import Isa
from emberd.compile.kernels.gated_activation import Kind, gated_activation, reference
from random_shapes import odd, random_shapes

CASES: list[tuple[Kind, int]] = [("silu", 5), ("silu", 48), ("sigmoid", 7), ("sigmoid", 2048)]
CASES += random_shapes("gated_activation", lambda r: ("silu", odd(r, 1, 300)))
TOKENS = 5


@pytest.fixture(scope="module")
def library(isa: Isa, harness: Any) -> Any:
    return harness.library(
        isa,
        [
            gated_activation(isa, kind=kind, columns=columns, tokens=tokens)
            for kind, columns in CASES
            for tokens in (1, None)
        ],
    )


@pytest.mark.parametrize(("kind", "columns"), CASES)
def test_many_tokens_agree_with_the_reference_and_with_one_at_a_time(
    kind: Kind, columns: int, harness: Any, library: Any
) -> None:
    random = np.random.default_rng(columns)
    gate = (random.standard_normal((TOKENS, columns)) * 30).astype(np.float32)
    gate[0, :4] = [-1e30, -88.0, 88.0, 1e30]
    up = random.standard_normal((TOKENS, columns)).astype(np.float32)
    name = f"gated_activation_{kind}_n{columns}"

    def run(rows: slice, suffix: str) -> np.ndarray:
        inputs = [harness.aligned(array[rows]) for array in (gate, up)]
        y: np.ndarray = harness.empty(np.float32, inputs[0].shape)
        library(f"{name}_{suffix}", *inputs, y)
        return y

    many = run(slice(None), "tn")
    expected = reference(gate.astype(np.float64), up.astype(np.float64), kind=kind)
    np.testing.assert_allclose(many, expected, rtol=1e-6, atol=1e-30)
    single = [run(slice(token, token + 1), "t1") for token in range(TOKENS)]
    assert np.array_equal(many, np.concatenate(single))
