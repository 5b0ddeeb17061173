"""Elementary functions of vectors against float64, over their whole range."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from emberd.compile.isa.isa import Isa
from emberd.compile.isa.math import (
    exp,
    max_modulo,
    sigmoid,
    silu,
    softplus,
    sum_each,
    sum_modulo,
)
from emberd.compile.isa.vector import Expr, kernel, load, store
from tvm.script import tirx as T  # noqa: N812

COUNT = 1 << 16

Function = Callable[[Expr], Expr]


Compute = Callable[..., np.ndarray]


@pytest.fixture
def compute(isa: Isa, harness: Any) -> Compute:
    """compute(function, x, lanes): function(x), taken `lanes` elements at a time."""

    def compute(function: Function, x: np.ndarray, lanes: int = isa.lanes) -> np.ndarray:
        with kernel("elementwise") as builder:
            source = T.arg("x", T.buffer(x.shape, "float32"))
            target = T.arg("y", T.buffer(x.shape, "float32"))
            with T.sblock("root"), T.serial(0, x.size // lanes) as i:
                store(target, function(load(source, [i * lanes], lanes)), [i * lanes])
        y: np.ndarray = harness.empty(np.float32, x.shape)
        harness.library(isa, [builder.get()])("elementwise", harness.aligned(x), y)
        return y

    return compute


def _range(low: float, high: float) -> np.ndarray:
    return np.linspace(low, high, COUNT, dtype=np.float32)


@pytest.mark.parametrize("scalar", [False, True])
def test_exp(compute: Compute, scalar: bool) -> None:
    x = _range(-87.3, 88.3)
    y = compute(exp, x, 1) if scalar else compute(exp, x)
    np.testing.assert_allclose(y, np.exp(x.astype(np.float64)), rtol=2e-7, atol=0)


def test_exp_of_zero_is_one(compute: Compute) -> None:
    assert (compute(exp, np.zeros(16, np.float32)) == 1.0).all()


def test_exp_beyond_its_range(compute: Compute) -> None:
    x = np.array([-np.inf, -3e38, -1e9, -104.0, 89.0, 1e9, 3e38, np.inf], np.float32)
    y = compute(exp, np.tile(x, 2))
    assert np.array_equal(y, np.tile([0.0] * 4 + [np.inf] * 4, 2))


@pytest.mark.parametrize("limit", [10.0, 80.0])
def test_sigmoid_and_silu(compute: Compute, limit: float) -> None:
    x = _range(-limit, limit)
    wide = x.astype(np.float64)
    expected = 1.0 / (1.0 + np.exp(-wide))
    y = compute(sigmoid, x)
    np.testing.assert_allclose(y, expected, rtol=5e-7, atol=0)
    y = compute(silu, x)
    np.testing.assert_allclose(y, wide * expected, rtol=5e-7, atol=0)


@pytest.mark.parametrize(("low", "high"), [(-80.0, 0.0), (-1.0, 1.0), (0.0, 30.0), (30.0, 1e6)])
def test_softplus(compute: Compute, low: float, high: float) -> None:
    x = _range(low, high)
    y = compute(softplus, x)
    np.testing.assert_allclose(y, np.logaddexp(0.0, x.astype(np.float64)), rtol=5e-7, atol=0)


@pytest.mark.parametrize("function", [sigmoid, silu, softplus])
def test_nothing_overflows_into_nan(compute: Compute, function: Function) -> None:
    x = np.array([-3e38, -1e5, -200.0, -100.0, 100.0, 200.0, 1e5, 3e38], np.float32)
    y = compute(function, np.tile(x, 2))
    assert np.isfinite(y).all()


def test_reductions_across_lanes(isa: Isa, harness: Any) -> None:
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
    y = harness.empty(np.float32, (3, lanes))
    harness.library(isa, [builder.get()])("reductions", harness.aligned(x), y)
    pairs = x[0].reshape(-1, 2)
    assert np.array_equal(y[0], x.sum(axis=1))
    assert np.array_equal(y[1], np.tile(pairs.sum(axis=0), lanes // 2))
    assert np.array_equal(y[2], np.tile(pairs.max(axis=0), lanes // 2))
