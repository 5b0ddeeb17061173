"""weighted_sum against numpy, on every ISA of this machine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from emberd.compile.isa.isa import Isa
from emberd.compile.kernels.weighted_sum import reference, weighted_sum
from random_shapes import odd, random_shapes

SHAPES = [(1, 16), (3, 19), (10, 320)]  # top_k, columns
SHAPES += random_shapes("weighted_sum", lambda r: (r.randint(1, 12), odd(r, 1, 300)))


@pytest.fixture(scope="module")
def library(isa: Isa, harness: Any) -> Any:
    kernels = [
        weighted_sum(isa, columns=columns, top_k=top_k, shared=shared)
        for top_k, columns in SHAPES
        for shared in (False, True)
    ]
    return harness.library(isa, kernels)


@pytest.mark.parametrize(("top_k", "columns"), SHAPES)
@pytest.mark.parametrize("tokens", [2, 37])
@pytest.mark.parametrize("shared", [False, True])
def test_agrees_with_reference(
    library: Any, harness: Any, top_k: int, columns: int, tokens: int, shared: bool
) -> None:
    random = np.random.default_rng(columns)
    outputs = random.standard_normal((tokens * top_k, columns)).astype(np.float32)
    weights = random.random((tokens, top_k)).astype(np.float32)
    y = harness.empty(np.float32, (tokens, columns))
    shapes = [(tokens, 1), (tokens, columns), (tokens, columns)] if shared else []
    more = [random.standard_normal(shape).astype(np.float32) for shape in shapes]
    name = f"weighted_sum{'_shared' if shared else ''}_n{columns}_k{top_k}"
    library(name, *(harness.aligned(array) for array in (outputs, weights, *more)), y)
    np.testing.assert_allclose(y, reference(outputs, weights, *more), rtol=1e-5, atol=1e-5)
