"""simplify_gather removes the wrapping of indices that are known not to be negative, no other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from emberd.compile.passes.operators import tensor
from emberd.compile.passes.rewrite import report
from emberd.compile.passes.simplify_gather import simplify_gather
from relax_functions import agree, calls, function, random
from tvm import relax
from tvm.relax import op

ROWS = 6
PARAMETERS = {"ids": tensor([4], "int64"), "table": (ROWS, 3), "scores": (4, ROWS)}
ARGUMENTS = (np.array([5, 0, 2, 2]), random(ROWS, 3), random(4, ROWS))


def _number(value: int) -> relax.Expr:
    return relax.const(value, "int64")


def _wrapped(index: Any, bound: int = 0) -> Any:
    return op.where(op.less(index, _number(bound)), op.add(index, _number(ROWS)), index)


def test_graph_inputs_are_taken_as_they_are() -> None:
    def body(emit: Any, ids: Any, table: Any, scores: Any) -> Any:
        return op.take(table, _wrapped(ids), axis=0)

    before = function(PARAMETERS, body)
    after = simplify_gather()(before)
    assert calls(after) == ["relax.take"]
    assert report(after) == ["simplify_gather: 1 x index wrapping removed (ids)"]
    assert agree(before, after, *ARGUMENTS)


def test_the_ids_of_a_top_k_are_taken_as_they_are() -> None:
    def body(emit: Any, ids: Any, table: Any, scores: Any) -> Any:
        chosen = emit(relax.TupleGetItem(emit(op.topk(scores, 2, dtype="int64")), 1))
        return op.take(table, _wrapped(chosen), axis=0), op.take(table, _wrapped(chosen), axis=1)

    after = simplify_gather()(function(PARAMETERS, body))
    assert calls(after) == ["relax.topk", "relax.take", "relax.take"]


def _computed_index(emit: Any, ids: Any, table: Any, scores: Any) -> Any:
    return op.take(table, _wrapped(emit(op.subtract(ids, _number(3)))), axis=0)


def _other_bound(emit: Any, ids: Any, table: Any, scores: Any) -> Any:
    return op.take(table, _wrapped(ids, bound=1), axis=0)


def _other_index(emit: Any, ids: Any, table: Any, scores: Any) -> Any:
    shifted = op.add(ids, _number(1))
    return op.where(op.less(ids, _number(0)), op.add(ids, _number(ROWS)), shifted)


@pytest.mark.parametrize("body", [_computed_index, _other_bound, _other_index])
def test_other_choices_are_left_alone(body: Any) -> None:
    before = function(PARAMETERS, body)
    after = simplify_gather()(before)
    assert report(after) == []
    assert calls(after) == calls(before)
