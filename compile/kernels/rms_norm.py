"""RMSNorm over the rows of a matrix (Zhang and Sennrich, 2019), optionally gated with SiLU.

Qwen3.5 stores most norm weights around zero (y = x / rms * (1 + w)); the output norm of a gated
delta layer has plain weights and a gate (y = x / rms * w * silu(gate)).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from emberd.compile.isa.isa import Isa
from emberd.compile.isa.math import Register, reciprocal_sqrt, silu
from emberd.compile.isa.vector import (
    Buffer,
    Expr,
    PrimFunc,
    broadcast,
    constant,
    kernel,
    load,
    multiply_add,
    store,
    sum_lanes,
)
from emberd.compile.kernels.dimensions import (
    Scratch,
    dimension,
    parallel_unless_small,
    token_suffix,
    vector_lanes,
)
from emberd.compile.kernels.dot import FloatRow
from numpy.typing import NDArray
from tvm.script import tirx as T  # noqa: N812


class Norm(NamedTuple):
    """An RMSNorm without a gate; `zero_centred`: it multiplies by 1 + weight."""

    eps: float
    zero_centred: bool

    def suffix(self) -> str:
        """How a kernel's name tells it."""
        eps = self.eps.hex().replace("-", "m").replace("+", "").replace(".", "_")
        return f"eps{eps}" + "_zero_centred" * self.zero_centred


def reference(
    x: NDArray[np.float64],
    weight: NDArray[np.float64],
    gate: NDArray[np.float64] | None = None,
    *,
    eps: float,
    zero_centred: bool,
) -> NDArray[np.float64]:
    """x [R, D], weight [D], gate [R, D] -> y [R, D]."""
    scale = 1.0 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    y: NDArray[np.float64] = x * scale * (1.0 + weight if zero_centred else weight)
    return y if gate is None else y * gate / (1.0 + np.exp(-gate))


def rms_norm(
    isa: Isa, *, columns: int, eps: float, zero_centred: bool, gated: bool, rows: int | None
) -> PrimFunc:
    """x f32[R, columns], weight f32[columns], (gate f32[R, columns]) -> y f32[R, columns].

    A row is a token, or one head of a token; `rows` is None where their number is known only at
    run time.
    """
    lanes = vector_lanes(isa, columns)
    norm = Norm(eps, zero_centred)
    name = f"rms_norm_n{columns}_{norm.suffix()}" + "_gated" * gated
    with kernel(f"{name}_{token_suffix(rows)}") as builder:
        shape = (dimension("rows", rows), columns)
        x = T.arg("x", T.buffer(shape, "float32"))
        weight = T.arg("weight", T.buffer((columns,), "float32"))
        gate = T.arg("gate", T.buffer(shape, "float32")) if gated else None
        y = T.arg("y", T.buffer(shape, "float32"))
        with T.sblock("root"), parallel_unless_small(shape[0], columns) as row:
            normed = normed_row(isa, x, weight, row, norm)
            with T.serial(0, columns // lanes) as vector:
                at = [row, vector * lanes]
                value = normed(vector * lanes, lanes)
                if gate is not None:
                    value = value * silu(load(gate, at, lanes))
                store(y, value, at)
    return builder.get()


def rms_norm_scratch(
    rows: int, *, columns: int, eps: float, zero_centred: bool, gated: bool
) -> Scratch:
    """None is needed."""
    return []


def normed_row(isa: Isa, x: Buffer, weight: Buffer, row: Expr, norm: Norm) -> FloatRow:
    """Row `row` of x f32[R, D], normed."""
    columns = int(x.shape[1])
    scale = _reciprocal_rms(x, row, columns, vector_lanes(isa, columns), norm.eps)

    def values(column: Expr, lanes: int) -> Expr:
        factor = load(weight, [column], lanes)
        if norm.zero_centred:
            factor = T.Bind(factor + constant(1.0, lanes))
        return T.Bind(load(x, [row, column], lanes) * broadcast(scale, lanes) * factor)

    return values


def _reciprocal_rms(x: Expr, row: Expr, columns: int, lanes: int, eps: float) -> Expr:
    """1 / sqrt(mean(x[row]^2) + eps)."""
    chains = 4 if columns % (4 * lanes) == 0 else 1  # independent sums hide the latency of adding
    sums = [Register(constant(0.0, lanes)) for _ in range(chains)]
    with T.serial(0, columns // (chains * lanes)) as step:
        for chain, total in enumerate(sums):
            value = load(x, [row, (step * chains + chain) * lanes], lanes)
            total.add_product(value, value)
    while len(sums) > 1:
        for a, b in zip(sums[::2], sums[1::2], strict=True):
            a.set(a.value + b.value)
        sums = sums[::2]
    total = sum_lanes(sums[0].value)
    return reciprocal_sqrt(multiply_add(total, T.float32(1.0 / columns), T.float32(eps)))
