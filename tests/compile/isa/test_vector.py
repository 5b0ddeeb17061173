"""The vector layer: rounding, reductions, and how dimensions are cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from emberd.compile.isa.isa import Isa
from emberd.compile.isa.vector import (
    Expr,
    for_block,
    for_vectors,
    kernel,
    load,
    max_lanes,
    round_to_int,
    store,
    sum_lanes,
)
from tvm.script import tirx as T  # noqa: N812

COUNT = 4096
CUTS = [(16, 4), (3, 4), (19, 4)]  # total, block size


def _map(name: str, lanes: int, result: str, function: Callable[[Expr], Expr]) -> Any:
    """x f32[COUNT] -> a vector or a scalar for every vector of x."""
    with kernel(name) as builder:
        x = T.arg("x", T.buffer((COUNT // lanes, lanes), "float32"))
        shape = (COUNT // lanes, lanes if name == "round" else 1)
        y = T.arg("y", T.buffer(shape, result))
        with T.sblock("root"), T.serial(0, COUNT // lanes) as i:
            store(y, function(load(x, [i, 0], lanes)), [i, 0])
    return builder.get()


def _count_blocks(total: int, size: int) -> Any:
    """y i32[blocks]: the number of elements of each block."""
    blocks = -(-total // size)
    with kernel(f"blocks_{total}") as builder:
        y = T.arg("y", T.buffer((blocks,), "int32"))
        with T.sblock("root"), T.serial(0, blocks) as block:
            for_block(block, total, size, lambda count: store(y, T.int32(count), [block]))
    return builder.get()


def _copy(total: int, lanes: int) -> Any:
    with kernel(f"copy_{total}") as builder:
        x = T.arg("x", T.buffer((total,), "float32"))
        y = T.arg("y", T.buffer((total,), "float32"))
        with T.sblock("root"):
            for_vectors(total, lanes, lambda at, count: store(y, load(x, [at], count), [at]))
    return builder.get()


@pytest.fixture(scope="module")
def library(isa: Isa, harness: Any) -> Any:
    return harness.library(
        isa,
        [
            _map("round", isa.lanes, "int32", round_to_int),
            _map("sum", isa.lanes, "float32", sum_lanes),
            _map("max", isa.lanes, "float32", max_lanes),
            *(_count_blocks(*cut) for cut in CUTS),
            *(_copy(total, 4) for total, _ in CUTS),
        ],
    )


def test_rounds_to_nearest_even(isa: Isa, library: Any, harness: Any) -> None:
    random = np.random.default_rng(0)
    x = (random.standard_normal(COUNT) * 1000).astype(np.float32).reshape(-1, isa.lanes)
    x.flat[:6] = [0.5, 1.5, -0.5, -2.5, 2.0**22 - 1, -(2.0**22) + 1]
    y = harness.empty(np.int32, x.shape)
    library("round", harness.aligned(x), y)
    np.testing.assert_array_equal(y, np.rint(x))


@pytest.mark.parametrize(("name", "function"), [("sum", np.sum), ("max", np.max)])
def test_reduces_lanes(isa: Isa, library: Any, harness: Any, name: str, function: Any) -> None:
    x = np.random.default_rng(1).standard_normal((COUNT // isa.lanes, isa.lanes))
    x = x.astype(np.float32)
    y = harness.empty(np.float32, (len(x), 1))
    library(name, harness.aligned(x), y)
    np.testing.assert_allclose(y[:, 0], function(x, axis=1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("total", "size"), CUTS)
def test_blocks_cover_a_dimension(library: Any, harness: Any, total: int, size: int) -> None:
    y = harness.empty(np.int32, (-(-total // size),))
    library(f"blocks_{total}", y)
    np.testing.assert_array_equal(y, [min(size, total - i) for i in range(0, total, size)])


@pytest.mark.parametrize(("total", "size"), CUTS)
def test_vectors_cover_a_dimension(library: Any, harness: Any, total: int, size: int) -> None:
    x = np.arange(total, dtype=np.float32)
    y = harness.empty(np.float32, (total,))
    library(f"copy_{total}", harness.aligned(x), y)
    np.testing.assert_array_equal(y, x)
