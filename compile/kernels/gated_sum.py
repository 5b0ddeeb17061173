"""The end of an MoE layer: residual + routed experts + gated shared expert."""

from __future__ import annotations

import numpy as np
from emberd.compile.isa.isa import Isa
from emberd.compile.isa.math import Register, sigmoid
from emberd.compile.isa.vector import PrimFunc, broadcast, kernel, load, store
from emberd.compile.kernels.dimensions import (
    Scratch,
    block_size,
    dimension,
    parallel_unless_small,
    token_suffix,
    vector_lanes,
)
from numpy.typing import NDArray
from tvm.script import tirx as T  # noqa: N812


def reference(
    gate: NDArray[np.float64],
    shared: NDArray[np.float64],
    routed: NDArray[np.float64],
    residual: NDArray[np.float64],
) -> NDArray[np.float64]:
    """gate [T, 1]; shared, routed, residual [T, H] -> y [T, H]."""
    return residual + (routed + np.exp(-np.logaddexp(0.0, -gate)) * shared)


def gated_sum(isa: Isa, *, columns: int, tokens: int | None) -> PrimFunc:
    """gate f32[T,1], shared f32[T,columns], routed f32[T,columns], residual f32[T,columns]
    -> y f32[T,columns] = residual + (routed + sigmoid(gate) * shared)."""
    lanes = vector_lanes(isa, columns)
    block = block_size(columns)
    with kernel(f"gated_sum_n{columns}_{token_suffix(tokens)}") as builder:
        rows = dimension("tokens", tokens)
        shape = (rows, columns)
        gate = T.arg("gate", T.buffer((rows, 1), "float32"))
        shared = T.arg("shared", T.buffer(shape, "float32"))
        routed = T.arg("routed", T.buffer(shape, "float32"))
        residual = T.arg("residual", T.buffer(shape, "float32"))
        y = T.arg("y", T.buffer(shape, "float32"))
        blocks = columns // block
        with T.sblock("root"), parallel_unless_small(rows * blocks, block) as task:
            row = T.Bind(task // blocks)
            first = T.Bind(task % blocks * block)
            scale = T.Bind(sigmoid(broadcast(load(gate, [row, 0], 1), lanes)))
            with T.serial(0, block // min(block, lanes)) as vector:
                at = [row, first + vector * lanes]
                total = Register(load(routed, at, lanes))
                total.add_product(scale, load(shared, at, lanes))
                store(y, load(residual, at, lanes) + total.value, at)
    return builder.get()


def gated_sum_scratch(tokens: int, *, columns: int) -> Scratch:
    """None is needed."""
    return []
