"""fuse_rms_norm takes RMSNorm of the last axis, plain, zero-centred or gated, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from emberd.compile.passes.fuse_rms_norm import fuse_rms_norm
from emberd.compile.passes.rewrite import report
from relax_functions import agree, calls, function, random
from tvm import relax
from tvm.relax import op

ROWS, COLUMNS = 5, 24
PARAMETERS = {"x": (ROWS, COLUMNS), "weight": (COLUMNS,), "gate": (ROWS, COLUMNS)}
ARGUMENTS = (random(ROWS, COLUMNS), random(COLUMNS), random(ROWS, COLUMNS, seed=1))


def _scalar(value: float) -> relax.Expr:
    return relax.const(value, "float32")


def _root(x: Any, axis: int = -1) -> Any:
    mean = op.mean(op.multiply(x, x), axis, keepdims=True)
    return op.sqrt(op.add(mean, _scalar(1e-3)))


def _norm(x: Any, scale: Any, axis: int = -1) -> Any:
    return op.multiply(op.divide(x, _root(x, axis)), scale)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("centred", [False, True])
def test_a_norm_becomes_one_operator(centred: bool, gated: bool) -> None:
    def body(emit: Any, x: Any, weight: Any, gate: Any) -> Any:
        norm = _norm(x, op.add(_scalar(1.0), weight) if centred else weight)
        return op.multiply(norm, op.multiply(gate, op.sigmoid(gate))) if gated else norm

    before = function(PARAMETERS, body)
    after = fuse_rms_norm()(before)
    assert calls(after) == ["emberd.rms_norm"]
    assert report(after)[0] == "fuse_rms_norm: 1 x RMSNorm (x, weight)"
    assert len(report(after)) == 1 + gated
    assert agree(before, after, *ARGUMENTS)


def test_every_norm_of_a_block_is_found() -> None:
    def body(emit: Any, x: Any, weight: Any, gate: Any) -> Any:
        first = emit(_norm(x, weight))
        return op.add(first, _norm(first, op.add(weight, _scalar(1.0))))

    before = function(PARAMETERS, body)
    after = fuse_rms_norm()(before)
    assert calls(after) == ["emberd.rms_norm", "emberd.rms_norm", "relax.add"]
    assert report(after) == ["fuse_rms_norm: 2 x RMSNorm (x, weight; weight)"]
    assert agree(before, after, *ARGUMENTS)


def test_what_others_read_of_a_norm_stays() -> None:
    def body(emit: Any, x: Any, weight: Any, gate: Any) -> Any:
        root = emit(_root(x))
        return op.multiply(op.divide(x, root), weight), root

    before = function(PARAMETERS, body)
    after = fuse_rms_norm()(before)
    assert {"emberd.rms_norm", "relax.sqrt"} < set(calls(after))
    assert agree(before, after, *ARGUMENTS)


def _other_axis(emit: Any, x: Any, weight: Any, gate: Any) -> Any:
    return _norm(x, weight, axis=0)


def _scaled_by_a_matrix(emit: Any, x: Any, weight: Any, gate: Any) -> Any:
    return _norm(x, gate)


def _root_of_something_else(emit: Any, x: Any, weight: Any, gate: Any) -> Any:
    return op.multiply(op.divide(x, _root(gate)), weight)


@pytest.mark.parametrize("body", [_other_axis, _scaled_by_a_matrix, _root_of_something_else])
def test_what_is_no_rms_norm_is_left_alone(body: Any) -> None:
    before = function(PARAMETERS, body)
    after = fuse_rms_norm()(before)
    assert report(after) == []
    assert calls(after) == calls(before)


def test_only_one_plus_the_weight_is_a_zero_centred_weight() -> None:
    def body(emit: Any, x: Any, weight: Any, gate: Any) -> Any:
        return _norm(x, op.add(weight, _scalar(2.0)))

    before = function(PARAMETERS, body)
    after = fuse_rms_norm()(before)
    assert calls(after) == ["relax.add", "emberd.rms_norm"]
    assert agree(before, after, *ARGUMENTS)
