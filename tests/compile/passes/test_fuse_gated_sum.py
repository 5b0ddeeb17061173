"""fuse_gated_sum takes residual + (routed + sigmoid(gate) * shared), and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from emberd.compile.passes.fuse_gated_sum import fuse_gated_sum
from emberd.compile.passes.rewrite import report
from relax_functions import agree, calls, function, random
from tvm.relax import op

ROWS = (3, 8)
PARAMETERS = {"gate": (3, 1), "shared": ROWS, "routed": ROWS, "residual": ROWS, "row": (1, 8)}
ARGUMENTS = (random(3, 1), *(random(*ROWS, seed=seed) for seed in range(3)), random(1, 8))


def _in_order(emit: Any, gate: Any, shared: Any, routed: Any, residual: Any, row: Any) -> Any:
    return op.add(residual, op.add(routed, op.multiply(op.sigmoid(gate), shared)))


def _turned(emit: Any, gate: Any, shared: Any, routed: Any, residual: Any, row: Any) -> Any:
    return op.add(op.add(op.multiply(shared, op.sigmoid(gate)), routed), residual)


@pytest.mark.parametrize("body", [_in_order, _turned])
def test_the_sum_becomes_one_operator(body: Any) -> None:
    before = function(PARAMETERS, body)
    after = fuse_gated_sum()(before)
    assert calls(after) == ["emberd.gated_sum"]
    assert report(after) == [
        "fuse_gated_sum: 1 x gated shared expert (gate, shared, routed, residual)"
    ]
    assert agree(before, after, *ARGUMENTS)


def test_a_partial_sum_that_others_read_stays() -> None:
    def body(emit: Any, gate: Any, shared: Any, routed: Any, residual: Any, row: Any) -> Any:
        inner = emit(op.add(routed, op.multiply(op.sigmoid(gate), shared)))
        return op.add(residual, inner), inner

    before = function(PARAMETERS, body)
    after = fuse_gated_sum()(before)
    assert calls(after).count("emberd.gated_sum") == calls(after).count("relax.add") == 1
    assert agree(before, after, *ARGUMENTS)


def _gate_of_every_number(
    emit: Any, gate: Any, shared: Any, routed: Any, residual: Any, row: Any
) -> Any:
    return op.add(residual, op.add(routed, op.multiply(op.sigmoid(shared), shared)))


def _row_for_all_tokens(
    emit: Any, gate: Any, shared: Any, routed: Any, residual: Any, row: Any
) -> Any:
    return op.add(row, op.add(routed, op.multiply(op.sigmoid(gate), shared)))


def _no_residual(emit: Any, gate: Any, shared: Any, routed: Any, residual: Any, row: Any) -> Any:
    return op.add(routed, op.multiply(op.sigmoid(gate), shared))


@pytest.mark.parametrize("body", [_gate_of_every_number, _row_for_all_tokens, _no_residual])
def test_other_sums_are_left_alone(body: Any) -> None:
    before = function(PARAMETERS, body)
    after = fuse_gated_sum()(before)
    assert report(after) == []
    assert calls(after) == calls(before)
