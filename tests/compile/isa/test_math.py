"""Elementary functions of vectors against float64, over their whole range."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
import tvm_ffi
from emberd.compile.isa.isa import Isa, host_isas
from emberd.compile.isa.math import (
    exp,
    load_float,
    max_modulo,
    sigmoid,
    silu,
    softplus,
    store_float,
    sum_each,
    sum_modulo,
)
from emberd.compile.isa.vector import Expr, kernel, load, store
from tvm.script import tirx as T  # noqa: N812

COUNT = 1 << 16

Function = Callable[[Expr], Expr]


@pytest.fixture(scope="module", params=host_isas(), ids=lambda isa: isa.name)
def isa(request: pytest.FixtureRequest) -> Isa:
    param: Isa = request.param
    return param


def _aligned(array: np.ndarray) -> np.ndarray:
    memory = np.zeros(array.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def _call(isa: Isa, function: Any, *arrays: np.ndarray) -> None:
    name = str(function.attrs["global_symbol"])
    module = tvm.tirx.build(tvm.IRModule({name: function}), target=isa.target)
    module[name](*(tvm_ffi.from_dlpack(array) for array in arrays))


def _elementwise(isa: Isa, function: Function, x: np.ndarray, lanes: int) -> np.ndarray:
    """function(x), computed `lanes` elements at a time."""
    with kernel("elementwise") as builder:
        source = T.arg("x", T.buffer(x.shape, "float32"))
        target = T.arg("y", T.buffer(x.shape, "float32"))
        with T.sblock("root"), T.serial(0, x.size // lanes) as i:
            store(target, function(load(source, [i * lanes], lanes)), [i * lanes])
    y = _aligned(np.zeros_like(x))
    _call(isa, builder.get(), _aligned(x), y)
    return y


def _range(low: float, high: float) -> np.ndarray:
    return np.linspace(low, high, COUNT, dtype=np.float32)


@pytest.mark.parametrize("scalar", [False, True])
def test_exp(isa: Isa, scalar: bool) -> None:
    x = _range(-87.3, 88.3)
    y = _elementwise(isa, exp, x, 1 if scalar else isa.lanes)
    np.testing.assert_allclose(y, np.exp(x.astype(np.float64)), rtol=2e-7, atol=0)


def test_exp_of_zero_is_one(isa: Isa) -> None:
    assert (_elementwise(isa, exp, np.zeros(16, np.float32), isa.lanes) == 1.0).all()


def test_exp_beyond_its_range(isa: Isa) -> None:
    x = np.array([-np.inf, -3e38, -1e9, -104.0, 89.0, 1e9, 3e38, np.inf], np.float32)
    y = _elementwise(isa, exp, np.tile(x, 2), isa.lanes)
    assert np.array_equal(y, np.tile([0.0] * 4 + [np.inf] * 4, 2))


@pytest.mark.parametrize("limit", [10.0, 80.0])
def test_sigmoid_and_silu(isa: Isa, limit: float) -> None:
    x = _range(-limit, limit)
    wide = x.astype(np.float64)
    expected = 1.0 / (1.0 + np.exp(-wide))
    y = _elementwise(isa, sigmoid, x, isa.lanes)
    np.testing.assert_allclose(y, expected, rtol=5e-7, atol=0)
    y = _elementwise(isa, silu, x, isa.lanes)
    np.testing.assert_allclose(y, wide * expected, rtol=5e-7, atol=0)


@pytest.mark.parametrize(("low", "high"), [(-80.0, 0.0), (-1.0, 1.0), (0.0, 30.0), (30.0, 1e6)])
def test_softplus(isa: Isa, low: float, high: float) -> None:
    x = _range(low, high)
    y = _elementwise(isa, softplus, x, isa.lanes)
    np.testing.assert_allclose(y, np.logaddexp(0.0, x.astype(np.float64)), rtol=5e-7, atol=0)


@pytest.mark.parametrize("function", [sigmoid, silu, softplus])
def test_nothing_overflows_into_nan(isa: Isa, function: Function) -> None:
    x = np.array([-3e38, -1e5, -200.0, -100.0, 100.0, 200.0, 1e5, 3e38], np.float32)
    y = _elementwise(isa, function, np.tile(x, 2), isa.lanes)
    assert np.isfinite(y).all()


def test_reductions_across_lanes(isa: Isa) -> None:
    lanes = isa.lanes
    x = np.random.default_rng(0).integers(-99, 99, (lanes, lanes)).astype(np.float32)
    with kernel("reductions") as builder:
        source = T.arg("x", T.buffer((lanes, lanes), "float32"))
        target = T.arg("y", T.buffer((3, lanes), "float32"))
        with T.sblock("root"):
            vectors = [load(source, [i, 0], lanes) for i in range(lanes)]
            store(target, sum_each(vectors), [0, 0])
            store(target, sum_modulo(vectors[0], 2), [1, 0])
            store(target, max_modulo(vectors[0], 2), [2, 0])
    y = _aligned(np.zeros((3, lanes), np.float32))
    _call(isa, builder.get(), _aligned(x), y)
    pairs = x[0].reshape(-1, 2)
    assert np.array_equal(y[0], x.sum(axis=1))
    assert np.array_equal(y[1], np.tile(pairs.sum(axis=0), lanes // 2))
    assert np.array_equal(y[2], np.tile(pairs.max(axis=0), lanes // 2))


def test_half_precision_round_trip(isa: Isa) -> None:
    """All finite float16 numbers, the values half way between them, and what is out of range."""
    exact = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    exact = np.sort(exact[np.isfinite(exact)]).astype(np.float32)
    between = (exact[1:] + exact[:-1]) / 2
    x = np.concatenate([exact, between, [65519.0, 65520.0, -1e30, 3e38]]).astype(np.float32)
    x = _aligned(np.pad(x, (0, -len(x) % isa.lanes)))
    with kernel("halves") as builder:
        source = T.arg("x", T.buffer(x.shape, "float32"))
        half = T.arg("half", T.buffer(x.shape, "float16"))
        target = T.arg("y", T.buffer(x.shape, "float32"))
        with T.sblock("root"), T.serial(0, x.size // isa.lanes) as i:
            at = [i * isa.lanes]
            store_float(isa, half, load(source, at, isa.lanes), at)
            store(target, load_float(isa, half, at, isa.lanes), at)
    stored, y = _aligned(np.zeros(x.shape, np.float16)), _aligned(np.zeros_like(x))
    _call(isa, builder.get(), x, stored, y)
    limit = np.finfo(np.float16).max
    assert np.array_equal(stored, np.clip(x, -limit, limit).astype(np.float16))
    assert np.array_equal(y, stored.astype(np.float32))
