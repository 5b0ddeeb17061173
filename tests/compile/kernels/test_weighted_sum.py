"""weighted_sum against numpy, on every ISA of this machine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from emberd.compile.isa.isa import Isa
from emberd.compile.kernels.weighted_sum import reference, weighted_sum

SHAPES = [(1, 16), (3, 19), (10, 320)]  # top_k, columns


@pytest.fixture(scope="module")
def library(isa: Isa, harness: Any) -> Any:
    kernels = [weighted_sum(isa, columns=columns, top_k=top_k) for top_k, columns in SHAPES]
    return harness.library(isa, kernels)


@pytest.mark.parametrize(("top_k", "columns"), SHAPES)
@pytest.mark.parametrize("tokens", [2, 37])
def test_agrees_with_reference(
    library: Any, harness: Any, top_k: int, columns: int, tokens: int
) -> None:
    random = np.random.default_rng(columns)
    outputs = random.standard_normal((tokens * top_k, columns)).astype(np.float32)
    weights = random.random((tokens, top_k)).astype(np.float32)
    y = harness.empty(np.float32, (tokens, columns))
    name = f"weighted_sum_n{columns}_k{top_k}"
    library(name, harness.aligned(outputs), harness.aligned(weights), y)
    np.testing.assert_allclose(y, reference(outputs, weights), rtol=1e-5, atol=1e-5)
