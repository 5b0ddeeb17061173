"""The end of a mixture of experts for many tokens: each token's outputs, added up by weight.

Where the layer has a shared expert, its output and the residual are added as well.
"""

from __future__ import annotations

from typing import NamedTuple

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


def reference(
    outputs: NDArray[np.float32],
    weights: NDArray[np.float32],
    *shared: NDArray[np.float32],
) -> NDArray[np.float32]:
    """outputs [T*K, H], weights [T, K] -> y [T, H] = sum_k weights[:, k] * outputs[:, k].

    With shared: scales [T, 1], output [T, H], residual [T, H] -> residual + (y + scales * output).
    """
    tokens, top_k = weights.shape
    rows = outputs.reshape(tokens, top_k, -1).astype(np.float64)
    total: NDArray[np.float64] = (weights[:, :, None] * rows).sum(axis=1)
    if shared:
        scales, output, residual = (part.astype(np.float64) for part in shared)
        total = residual + (total + scales * output)
    return total.astype(np.float32)


def weighted_sum(isa: Isa, *, columns: int, top_k: int, shared: bool) -> PrimFunc:
    """outputs f32[T*K,columns], weights f32[T,K], (scales f32[T,1], shared f32[T,columns],
    residual f32[T,columns]) -> y f32[T,columns], summed in order of k, then as in `gated_sum`."""
    suffix = "_shared" if shared else ""
    with kernel(f"weighted_sum{suffix}_n{columns}_k{top_k}") as builder:
        rows = dimension("tokens")
        outputs = T.arg("outputs", T.buffer((rows * top_k, columns), "float32"))
        weights = T.arg("weights", T.buffer((rows, top_k), "float32"))
        end = None
        if shared:
            end = SharedOutput(
                T.arg("scales", T.buffer((rows, 1), "float32")),
                T.arg("shared", T.buffer((rows, columns), "float32")),
                T.arg("residual", T.buffer((rows, columns), "float32")),
            )
        y = T.arg("y", T.buffer((rows, columns), "float32"))
        with T.sblock("root"), T.parallel(0, rows) as token:
            sum_token(isa, outputs, weights, end, token, y)
    return builder.get()


class SharedOutput(NamedTuple):
    """What a shared expert gives to the end of a layer: its scale, its output; and the residual."""

    scales: Buffer  # float32 [T, 1]
    output: Buffer  # float32 [T, H]
    residual: Buffer  # float32 [T, H]


def sum_token(
    isa: Isa, outputs: Buffer, weights: Buffer, shared: SharedOutput | None, token: Expr, y: Buffer
) -> None:
    """Row `token` of y, as in `weighted_sum`."""
    top_k, columns = int(weights.shape[1]), int(y.shape[1])
    scale = None if shared is None else load(shared.scales, [token, 0], 1)

    def add_up(column: Expr, lanes: int) -> None:
        total = Register(constant(0.0, lanes))
        with T.serial(0, top_k) as rank:
            value = load(outputs, [token * top_k + rank, column], lanes)
            total.add_product(broadcast(weights[token, rank], lanes), value)
        value = total.value
        if shared is not None:
            at = [token, column]
            total.add_product(broadcast(scale, lanes), load(shared.output, at, lanes))
            value = load(shared.residual, at, lanes) + total.value
        store(y, value, [token, column])

    for_vectors(columns, isa.lanes, add_up)
