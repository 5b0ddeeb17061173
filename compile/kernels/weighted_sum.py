"""The end of a mixture of experts for many tokens: each token's outputs, added up by weight."""

from __future__ import annotations

import numpy as np
from emberd.compile.isa.isa import Isa
from emberd.compile.isa.math import Register
from emberd.compile.isa.vector import (
    Buffer,
    Expr,
    PrimFunc,
    broadcast,
    constant,
    for_vectors,
    kernel,
    load,
    store,
)
from emberd.compile.kernels.dimensions import dimension
from numpy.typing import NDArray
from tvm.script import tirx as T  # noqa: N812


def reference(outputs: NDArray[np.float32], weights: NDArray[np.float32]) -> NDArray[np.float32]:
    """outputs [T*K, H], weights [T, K] -> y [T, H] = sum_k weights[:, k] * outputs[:, k]."""
    tokens, top_k = weights.shape
    rows = outputs.reshape(tokens, top_k, -1).astype(np.float64)
    total: NDArray[np.float64] = (weights[:, :, None] * rows).sum(axis=1)
    return total.astype(np.float32)


def weighted_sum(isa: Isa, *, columns: int, top_k: int) -> PrimFunc:
    """outputs f32[T*K,columns], weights f32[T,K] -> y f32[T,columns], added in order of k: the sum
    that `moe` makes of one token."""
    with kernel(f"weighted_sum_n{columns}_k{top_k}") as builder:
        rows = dimension("tokens")
        outputs = T.arg("outputs", T.buffer((rows * top_k, columns), "float32"))
        weights = T.arg("weights", T.buffer((rows, top_k), "float32"))
        y = T.arg("y", T.buffer((rows, columns), "float32"))
        with T.sblock("root"), T.parallel(0, rows) as token:
            sum_token(isa, outputs, weights, token, y)
    return builder.get()


def sum_token(isa: Isa, outputs: Buffer, weights: Buffer, token: Expr, y: Buffer) -> None:
    """Row `token` of y, as in `weighted_sum`."""
    top_k, columns = int(weights.shape[1]), int(y.shape[1])

    def add_up(column: Expr, lanes: int) -> None:
        total = Register(constant(0.0, lanes))
        with T.serial(0, top_k) as rank:
            value = load(outputs, [token * top_k + rank, column], lanes)
            total.add_product(broadcast(weights[token, rank], lanes), value)
        store(y, total.value, [token, column])

    for_vectors(columns, isa.lanes, add_up)
