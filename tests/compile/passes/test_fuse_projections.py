"""fuse_projections: linear layers of one input, and only those, become one operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tvm
from emberd.compile.passes import operators
from emberd.compile.passes.fuse_projections import fuse_projections
from emberd.compile.passes.rewrite import report
from relax_functions import agree, calls, function, random

T, K = 3, 8


def _linear(x: Any, weight: Any) -> Any:
    rows, columns = operators.static_shape(weight)
    scalars: list[operators.Scalar] = ["f32", rows, columns, "float32"]
    return operators.call("linear", [x, weight], scalars, operators.tensor([T, rows]))


def _module(body: Callable[..., Any]) -> tvm.IRModule:
    return function({"x": (T, K), "first": (5, K), "second": (2, K), "third": (K, K)}, body)


INPUTS = [random(T, K), random(5, K), random(2, K), random(K, K)]


def test_layers_of_one_input_become_one_call() -> None:
    def body(emit: Any, x: Any, *weights: Any) -> Any:
        return tuple(_linear(x, weight) for weight in weights)

    before = _module(body)
    after = fuse_projections()(before)
    assert calls(after) == ["emberd.projections"]
    assert agree(before, after, *INPUTS)
    assert report(after) == [
        "fuse_projections: 1 x projections of one input (first, second, third)"
    ]


def test_each_input_has_a_call_of_its_own_where_it_is_known() -> None:
    def body(emit: Any, x: Any, first: Any, second: Any, third: Any) -> Any:
        hidden = emit(_linear(x, third))
        early = emit(_linear(x, first))
        return _linear(hidden, second), early, _linear(hidden, first), _linear(x, second)

    before = _module(body)
    after = fuse_projections()(before)
    assert calls(after) == ["emberd.projections"] * 2
    assert agree(before, after, *INPUTS)
    assert report(after) == [
        "fuse_projections: 2 x projections of one input (third, first, second; second, first)"
    ]


def test_single_layers_and_those_with_a_residual_stay() -> None:
    def body(emit: Any, x: Any, first: Any, second: Any, third: Any) -> Any:
        scalars: list[operators.Scalar] = ["f32", K, K, "float32"]
        result = operators.tensor([T, K])
        added = operators.call("linear", [x, third, x], scalars, result)
        return _linear(x, first), added

    before = _module(body)
    after = fuse_projections()(before)
    tvm.ir.assert_structural_equal(after, before)
    assert report(after) == []
