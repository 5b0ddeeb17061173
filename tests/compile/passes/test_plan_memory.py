"""The last phases: standard operators become kernels, and every tensor gets a place in memory."""

from __future__ import annotations

from typing import Any

import pytest
import tvm
from emberd.compile.passes.plan_memory import lower_remaining, plan_memory
from relax_functions import agree, calls, function, random
from tvm import relax
from tvm.relax import op

PARAMETERS = {"x": (4, 16), "y": (4, 16), "matrices": (4, 6, 16)}
ARGUMENTS = (random(4, 16), random(4, 16, seed=1), random(4, 6, 16))


def _chain(emit: Any, x: Any, y: Any, matrices: Any) -> Any:
    """Six steps, each of which needs only the one before it."""
    for _ in range(3):
        x = emit(op.concat([op.strided_slice(part, [1], [4], [12]) for part in (x, y)], axis=1))
        x = emit(op.reshape(op.permute_dims(op.reshape(x, (4, 4, 4)), [2, 1, 0]), (4, 16)))
    return x


def _first_is_needed_last(emit: Any, x: Any, y: Any, matrices: Any) -> Any:
    first = emit(op.permute_dims(op.reshape(op.add(x, y), (4, 4, 4)), [2, 0, 1]))
    second = emit(op.permute_dims(op.exp(first), [2, 0, 1]))
    third = emit(op.permute_dims(op.add(second, second), [1, 0, 2]))
    return op.add(third, first)


def _product_with_transposed_matrices(emit: Any, x: Any, y: Any, matrices: Any) -> Any:
    row = op.expand_dims(x, [1])
    return op.matmul(row, op.permute_dims(matrices, [0, 2, 1]))


BODIES = [_chain, _first_is_needed_last, _product_with_transposed_matrices]


@pytest.mark.parametrize("body", BODIES)
def test_only_kernels_and_views_remain(body: Any) -> None:
    before = function(PARAMETERS, body)
    after = _lowered(before)
    assert set(calls(after)) <= {"relax.call_tir", "relax.reshape"}
    assert agree(before, after, *ARGUMENTS)


def test_a_product_reads_transposed_matrices_where_they_lie() -> None:
    after = _lowered(function(PARAMETERS, _product_with_transposed_matrices))
    assert calls(after).count("relax.call_tir") == 1


@pytest.mark.parametrize("body", BODIES)
def test_planned_functions_only_place_and_call(body: Any) -> None:
    before = function(PARAMETERS, body)
    after = plan_memory()(_lowered(before))
    operators = {
        binding.value.op.name
        for block in after["main"].body.blocks
        for binding in block.bindings
        if isinstance(binding.value, relax.Call)
        and not isinstance(binding.value.op, relax.GlobalVar)
    }
    assert operators <= {
        "relax.memory.alloc_storage",
        "relax.memory.alloc_tensor",
        "relax.builtin.alloc_tensor",
        "relax.reshape",
    }
    assert agree(before, after, *ARGUMENTS)


def test_tensors_share_memory_when_they_are_not_needed_together() -> None:
    text = plan_memory()(_lowered(function(PARAMETERS, _chain))).script(show_meta=False)
    assert text.count("alloc_storage") < text.count("memory.alloc_tensor")


def _lowered(module: tvm.IRModule) -> tvm.IRModule:
    with tvm.target.Target("llvm"):
        return lower_remaining()(module)
