"""fuse_normed_projections: the norm of quantised layers moves, if nobody else reads it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tvm
from emberd.compile.passes import operators
from emberd.compile.passes.fuse_normed_projections import fuse_normed_projections
from emberd.compile.passes.fuse_projections import fuse_projections
from emberd.compile.passes.rewrite import report
from emberd.compile.quantize.formats import FORMATS
from relax_functions import agree, calls, function, random
from tvm import relax

T, K, N = 3, 32, 16
PACKED = FORMATS["q8"].pack(random(N, K))
INPUTS = [random(T, K), random(K), PACKED, random(5, K)]


def _norm(x: Any, weight: Any, *gate: Any) -> Any:
    return operators.call("rms_norm", [x, weight, *gate], [1e-6, 1], operators.tensor([T, K]))


def _linear(x: Any, weight: Any, name: str, *residual: Any) -> Any:
    rows, activations = (N, "int8") if name == "q8" else (5, "float32")
    scalars: list[operators.Scalar] = [name, rows, K, activations]
    return operators.call("linear", [x, weight, *residual], scalars, operators.tensor([T, rows]))


def _module(body: Callable[..., Any]) -> tvm.IRModule:
    packed = relax.TensorType(PACKED.shape, "uint8")
    parameters = {"x": (T, K), "norm": (K,), "packed": packed, "plain": (5, K)}
    return function(parameters, body)


def _fused(body: Callable[..., Any]) -> tuple[tvm.IRModule, tvm.IRModule]:
    before = fuse_projections()(_module(body))
    return before, fuse_normed_projections()(before)


def _single(emit: Any, x: Any, norm: Any, packed: Any, _plain: Any) -> Any:
    return _linear(emit(_norm(x, norm)), packed, "q8")


def _several(emit: Any, x: Any, norm: Any, packed: Any, plain: Any) -> Any:
    normed = emit(_norm(x, norm))
    return _linear(normed, packed, "q8"), _linear(normed, plain, "f32")


@pytest.mark.parametrize("body", [_single, _several])
def test_layers_take_the_norm_of_their_input(body: Callable[..., Any]) -> None:
    before, after = _fused(body)
    assert calls(after) == ["emberd.normed_projections"]
    assert agree(before, after, *INPUTS)
    assert report(after)[-1] == "fuse_normed_projections: 1 x RMSNorm (norm)"


def _read_by_others(emit: Any, x: Any, norm: Any, packed: Any, _plain: Any) -> Any:
    normed = emit(_norm(x, norm))
    return _linear(normed, packed, "q8"), relax.op.tanh(normed)


def _returned(emit: Any, x: Any, norm: Any, packed: Any, _plain: Any) -> Any:
    normed = emit(_norm(x, norm))
    return _linear(normed, packed, "q8"), normed


def _gated(emit: Any, x: Any, norm: Any, packed: Any, _plain: Any) -> Any:
    return _linear(emit(_norm(x, norm, x)), packed, "q8")


def _float(emit: Any, x: Any, norm: Any, _packed: Any, plain: Any) -> Any:
    return _linear(emit(_norm(x, norm)), plain, "f32")


def _residual(emit: Any, x: Any, norm: Any, packed: Any, _plain: Any) -> Any:
    first = emit(_linear(x, packed, "q8"))
    return _linear(emit(_norm(x, norm)), packed, "q8", first)


@pytest.mark.parametrize("body", [_read_by_others, _returned, _gated, _float, _residual])
def test_other_norms_stay(body: Callable[..., Any]) -> None:
    before, after = _fused(body)
    tvm.ir.assert_structural_equal(after, before)
    assert report(after) == report(before)
