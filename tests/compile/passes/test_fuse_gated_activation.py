"""fuse_gated_activation takes gates of the shape of what they gate, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from emberd.compile.passes.fuse_gated_activation import fuse_gated_activation
from emberd.compile.passes.rewrite import report
from relax_functions import agree, calls, function, random
from tvm.relax import op

PARAMETERS = {"gate": (3, 2, 8), "up": (3, 2, 8), "column": (3, 2, 1)}
ARGUMENTS = (random(3, 2, 8), random(3, 2, 8, seed=1), random(3, 2, 1))


def _silu(emit: Any, gate: Any, up: Any, column: Any) -> Any:
    return op.multiply(op.multiply(op.sigmoid(gate), gate), up)


def _silu_behind(emit: Any, gate: Any, up: Any, column: Any) -> Any:
    return op.multiply(up, op.multiply(gate, op.sigmoid(gate)))


def _sigmoid(emit: Any, gate: Any, up: Any, column: Any) -> Any:
    return op.multiply(up, op.sigmoid(gate))


@pytest.mark.parametrize(
    ("body", "kind"), [(_silu, "silu"), (_silu_behind, "silu"), (_sigmoid, "sigmoid")]
)
def test_a_gate_becomes_one_operator(body: Any, kind: str) -> None:
    before = function(PARAMETERS, body)
    after = fuse_gated_activation()(before)
    assert calls(after) == ["emberd.gated_activation"]
    assert report(after) == [f"fuse_gated_activation: 1 x {kind} gate (gate, up)"]
    assert agree(before, after, *ARGUMENTS)


def test_an_activation_that_others_read_stays() -> None:
    def body(emit: Any, gate: Any, up: Any, column: Any) -> Any:
        activated = emit(op.sigmoid(gate))
        return op.multiply(activated, up), op.add(activated, up)

    before = function(PARAMETERS, body)
    after = fuse_gated_activation()(before)
    assert sorted(calls(after)) == ["emberd.gated_activation", "relax.add", "relax.sigmoid"]
    assert agree(before, after, *ARGUMENTS)


def _one_gate_for_a_row(emit: Any, gate: Any, up: Any, column: Any) -> Any:
    return op.multiply(up, op.sigmoid(column))


def _other_function(emit: Any, gate: Any, up: Any, column: Any) -> Any:
    return op.multiply(up, op.tanh(gate))


def _sum(emit: Any, gate: Any, up: Any, column: Any) -> Any:
    return op.add(up, op.sigmoid(gate))


@pytest.mark.parametrize("body", [_one_gate_for_a_row, _other_function, _sum])
def test_what_is_no_gate_is_left_alone(body: Any) -> None:
    before = function(PARAMETERS, body)
    after = fuse_gated_activation()(before)
    assert report(after) == []
    assert calls(after) == calls(before)
