"""fuse_linear and fuse_embedding take products with and look-ups in weights, and nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from emberd.compile.passes.fuse_linear import fuse_embedding, fuse_linear
from emberd.compile.passes.operators import tensor
from emberd.compile.passes.rewrite import report
from relax_functions import agree, calls, function, random
from tvm.relax import op

PARAMETERS = {"x": (3, 8), "weight": (8, 8), "residual": (3, 8), "row": (8,)}
ARGUMENTS = (random(3, 8), random(8, 8), random(3, 8, seed=1), random(8))


def _product(x: Any, weight: Any) -> Any:
    return op.matmul(x, op.permute_dims(weight, [1, 0]))


def test_a_product_becomes_a_linear() -> None:
    before = function(PARAMETERS, lambda emit, x, weight, residual, row: _product(x, weight))
    after = fuse_linear()(before)
    assert calls(after) == ["emberd.linear"]
    assert report(after) == ["fuse_linear: 1 x projection (x, weight)"]
    assert agree(before, after, *ARGUMENTS)


@pytest.mark.parametrize("turned", [False, True])
def test_a_residual_moves_into_the_linear(turned: bool) -> None:
    def body(emit: Any, x: Any, weight: Any, residual: Any, row: Any) -> Any:
        terms = [residual, _product(x, weight)]
        return op.add(*reversed(terms)) if turned else op.add(*terms)

    before = function(PARAMETERS, body)
    after = fuse_linear()(before)
    assert calls(after) == ["emberd.linear"]
    assert report(after)[-1] == (
        "fuse_linear: 1 x residual added by its projection (x, weight, residual)"
    )
    assert agree(before, after, *ARGUMENTS)


def test_a_product_that_others_read_is_also_computed_for_them() -> None:
    def body(emit: Any, x: Any, weight: Any, residual: Any, row: Any) -> Any:
        product = emit(_product(x, weight))
        return op.add(product, residual), op.tanh(product)

    before = function(PARAMETERS, body)
    assert agree(before, fuse_linear()(before), *ARGUMENTS)


def test_a_bias_of_all_rows_is_no_residual() -> None:
    def body(emit: Any, x: Any, weight: Any, residual: Any, row: Any) -> Any:
        return op.add(_product(x, weight), row)

    before = function(PARAMETERS, body)
    after = fuse_linear()(before)
    assert calls(after) == ["emberd.linear", "relax.add"]
    assert agree(before, after, *ARGUMENTS)


def _not_transposed(emit: Any, x: Any, weight: Any, residual: Any, row: Any) -> Any:
    return op.matmul(x, weight)


def _transposed_to_itself(emit: Any, x: Any, weight: Any, residual: Any, row: Any) -> Any:
    return op.matmul(x, op.permute_dims(weight, [0, 1]))


def _batched(emit: Any, x: Any, weight: Any, residual: Any, row: Any) -> Any:
    return _product(op.expand_dims(x, [0]), weight)


@pytest.mark.parametrize("body", [_not_transposed, _transposed_to_itself, _batched])
def test_other_products_are_left_alone(body: Any) -> None:
    before = function(PARAMETERS, body)
    after = fuse_linear()(before)
    assert report(after) == []
    assert calls(after) == calls(before)


LOOK_UP = {"tokens": tensor([4], "int32"), "table": (4, 4), "pairs": tensor([2, 2], "int32")}
LOOKED_UP = (
    np.array([3, 0, 1, 1], np.int32),
    random(4, 4),
    np.array([[3, 0], [1, 1]], np.int32),
)


def test_a_look_up_becomes_an_embedding() -> None:
    before = function(LOOK_UP, lambda emit, tokens, table, pairs: op.take(table, tokens, axis=0))
    after = fuse_embedding()(before)
    assert calls(after) == ["emberd.embedding"]
    assert report(after) == ["fuse_embedding: 1 x embedding (tokens, table)"]
    assert agree(before, after, *LOOKED_UP)


def _columns(emit: Any, tokens: Any, table: Any, pairs: Any) -> Any:
    return op.take(table, tokens, axis=1)


def _pairs(emit: Any, tokens: Any, table: Any, pairs: Any) -> Any:
    return op.take(table, pairs, axis=0)


def _no_weight(emit: Any, tokens: Any, table: Any, pairs: Any) -> Any:
    return op.take(op.tanh(table), tokens, axis=0)


@pytest.mark.parametrize("body", [_columns, _pairs, _no_weight])
def test_other_look_ups_are_left_alone(body: Any) -> None:
    before = function(LOOK_UP, body)
    after = fuse_embedding()(before)
    assert report(after) == []
    assert calls(after) == calls(before)
