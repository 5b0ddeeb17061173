"""The greatest of every few consecutive values: with them, whoever looks for the greatest values of
a long row reads few of its blocks."""

from __future__ import annotations

import numpy as np
from emberd.compile.isa.isa import Isa
from emberd.compile.isa.math import Register
from emberd.compile.isa.vector import (
    Expr,
    PrimFunc,
    broadcast,
    for_block,
    for_vectors,
    kernel,
    load,
    max_lanes,
    store,
)
from emberd.compile.kernels.dimensions import (
    Scratch,
    dimension,
    parallel_unless_small,
    token_suffix,
)
from numpy.typing import NDArray
from tvm.script import tirx as T  # noqa: N812


def reference(x: NDArray[np.float32], block: int) -> NDArray[np.float32]:
    """x [T, N] -> maxima [T, N / block rounded up]; NaN counts as -infinity."""
    padding = -x.shape[1] % block
    filled = np.where(np.isnan(x), np.float32(-np.inf), x)
    padded = np.pad(filled, ((0, 0), (0, padding)), constant_values=-np.inf)
    maxima: NDArray[np.float32] = padded.reshape(len(x), -1, block).max(axis=2)
    return maxima


def block_maxima(isa: Isa, *, columns: int, block: int, tokens: int | None) -> PrimFunc:
    """x f32[T,columns] -> maxima f32[T,ceil(columns/block)]; NaN counts as -infinity."""
    blocks = -(-columns // block)
    with kernel(f"block_maxima_n{columns}_b{block}_{token_suffix(tokens)}") as builder:
        rows = dimension("tokens", tokens)
        x = T.arg("x", T.buffer((rows, columns), "float32"))
        maxima = T.arg("maxima", T.buffer((rows, blocks), "float32"))
        with T.sblock("root"), parallel_unless_small(blocks, block) as index:

            def find(row: Expr, size: int) -> None:
                lowest = T.float32(float("-inf"))
                vector = Register(broadcast(lowest, isa.lanes))
                single = Register(lowest)

                def take(first: Expr, lanes: int) -> None:
                    value = load(x, [row, index * block + first], lanes)
                    greatest = single if lanes == 1 else vector
                    # Of a comparison with NaN, which is false, the second value is left.
                    greatest.set(T.Select(value > greatest.value, value, greatest.value))

                for_vectors(size, isa.lanes, take)
                rest, whole = single.value, max_lanes(vector.value)
                store(maxima, T.Select(rest > whole, rest, whole), [row, index])

            with T.serial(0, rows) as row:
                for_block(index, columns, block, lambda size: find(row, size))
    return builder.get()


def block_maxima_scratch(tokens: int, *, columns: int, block: int) -> Scratch:
    """None is needed."""
    return []
