"""fuse_expert_gather takes look-ups of experts by a router's ids, and nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from emberd.compile.passes.fuse_expert_gather import fuse_expert_gather
from emberd.compile.passes.operators import tensor
from emberd.compile.passes.rewrite import report
from relax_functions import agree, calls, function, random
from tvm.relax import op

PARAMETERS = {
    "ids": tensor([2, 3], "int32"),
    "experts": (4, 4, 5),
    "tokens": tensor([6], "int32"),
    "table": (4, 5),
}
IDS = np.array([[3, 0, 1], [1, 2, 3]], np.int32)
ARGUMENTS = (IDS, random(4, 4, 5), IDS.reshape(-1), random(4, 5))


def _wide(ids: Any) -> Any:
    return op.astype(ids, "int64")


def test_a_look_up_of_experts_becomes_a_gather() -> None:
    def body(emit: Any, ids: Any, experts: Any, tokens: Any, table: Any) -> Any:
        return op.take(experts, _wide(ids), axis=0)

    before = function(PARAMETERS, body)
    after = fuse_expert_gather()(before)
    assert calls(after) == ["emberd.gather_experts"]
    assert report(after) == ["fuse_expert_gather: 1 x gather of experts (ids, experts)"]
    assert agree(before, after, *ARGUMENTS)


def test_ids_that_others_read_stay() -> None:
    def body(emit: Any, ids: Any, experts: Any, tokens: Any, table: Any) -> Any:
        wide = emit(_wide(ids))
        return op.take(experts, wide, axis=0), op.astype(wide, "float32")

    before = function(PARAMETERS, body)
    after = fuse_expert_gather()(before)
    assert sorted(calls(after)) == ["emberd.gather_experts", "relax.astype", "relax.astype"]
    assert agree(before, after, *ARGUMENTS)


def _other_axis(emit: Any, ids: Any, experts: Any, tokens: Any, table: Any) -> Any:
    return op.take(experts, _wide(ids), axis=1)


def _rows(emit: Any, ids: Any, experts: Any, tokens: Any, table: Any) -> Any:
    return op.take(table, _wide(ids), axis=0)


def _flat_ids(emit: Any, ids: Any, experts: Any, tokens: Any, table: Any) -> Any:
    return op.take(experts, _wide(tokens), axis=0)


def _no_weight(emit: Any, ids: Any, experts: Any, tokens: Any, table: Any) -> Any:
    return op.take(op.tanh(experts), _wide(ids), axis=0)


@pytest.mark.parametrize("body", [_other_axis, _rows, _flat_ids, _no_weight])
def test_other_look_ups_are_left_alone(body: Any) -> None:
    before = function(PARAMETERS, body)
    after = fuse_expert_gather()(before)
    assert report(after) == []
    assert calls(after) == calls(before)
