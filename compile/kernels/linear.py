"""Linear layer: y = x W^T (+ residual), with W in f32, q8 or q4."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import add

import numpy as np
from emberd.compile.isa.isa import Isa
from emberd.compile.isa.vector import (
    Buffer,
    Expr,
    PrimFunc,
    for_block,
    kernel,
    load,
    prefetch,
    store,
    type_of,
)
from emberd.compile.kernels.activations import Activations, types_suffix
from emberd.compile.kernels.dimensions import (
    Dimension,
    Scratch,
    Tasks,
    dimension,
    token_suffix,
)
from emberd.compile.kernels.dot import (
    ROWS,
    FloatRow,
    Weights,
    dot_float,
    float_row,
    is_one,
    over_weights,
)
from emberd.compile.quantize.activations import Precision
from emberd.compile.quantize.formats import FORMATS, TILE, GroupFormat
from numpy.typing import NDArray
from tvm.script import tirx as T  # noqa: N812

Floats = NDArray[np.float32]

_TILES = 4  # of one task: together they read a block of token rows, so that it stays near


def reference(x: Floats, weight: Floats, residual: Floats | None = None) -> Floats:
    """x [T, K], weight [N, K] (unpacked), residual [T, N] -> y [T, N].

    The kernel computes `reference(quantise_reference(x, activations), ...)`.
    """
    y = x.astype(np.float64) @ weight.astype(np.float64).T
    return (y if residual is None else y + residual).astype(np.float32)


def linear(
    isa: Isa,
    *,
    format: str,
    activations: Precision,
    n: int,
    k: int,
    residual: bool,
    tokens: int | None,
) -> PrimFunc:
    """x f32[T,k], weight (f32[n,k] or u8[packed]), (residual f32[T,n]) -> y f32[T,n]; scratch.

    In q8 and q4, x is quantised to `activations` in groups of 32; the integer dot products of the
    groups are exact and added up in float32, in order of k. In f32, `activations` is float32.
    EmberdError when the format cannot take the dimensions.
    """
    weight_format = FORMATS[format]
    suffix = "_residual" if residual else ""
    types = types_suffix(format, activations)
    with kernel(f"linear{suffix}_{types}_n{n}_k{k}_{token_suffix(tokens)}") as builder:
        rows = dimension("tokens", tokens)
        x = T.arg("x", T.buffer((rows, k), "float32"))
        weight = weight_argument("weight", format, n, k)
        added = T.arg("residual", T.buffer((rows, n), "float32")) if residual else None
        y = T.arg("y", T.buffer((rows, n), "float32"))
        if isinstance(weight_format, GroupFormat):
            weights = Weights(weight_format, k, weight)
            quantised = Activations.arguments("x", rows, k, activations, weight_format.zero_point)
            with T.sblock("root"):
                quantise_rows(isa, partial(float_row, x), rows, [quantised])
                count, multiply = multiply_tasks(isa, weights, quantised, added, y)
                with over_weights(count, n * k // count, rows) as task:
                    multiply(task)
        else:
            with T.sblock("root"):
                dot_float(isa, weight, x, lambda value, at: _put(y, added, value, at))
    return builder.get()


def linear_scratch(tokens: int, *, format: str, activations: Precision, n: int, k: int) -> Scratch:
    """The quantised x."""
    if not isinstance(FORMATS[format], GroupFormat):
        return []
    return Activations.scratch(tokens, k, activations)


def weight_argument(name: str, format: str, n: int, k: int) -> Buffer:
    """Declares a weight f32[n,k] or u8[packed]; EmberdError when the format cannot take it."""
    weight_format = FORMATS[format]
    weight_format.check(n, k)
    if not isinstance(weight_format, GroupFormat):
        return T.arg(name, T.buffer((n, k), "float32"))
    return T.arg(name, T.buffer((T.int64(weight_format.packed_bytes(n, k)),), "uint8"))


def quantise_rows(
    isa: Isa, source: Callable[[Expr], FloatRow], rows: Dimension, targets: Sequence[Activations]
) -> None:
    """Quantises source(0), source(1), ... for every target. A single row is not worth waking the
    other threads."""
    if targets:
        with (T.serial if is_one(rows) else T.parallel)(0, rows) as row:
            values = source(row)
            for activations in targets:
                activations.store_row(isa, values, row)


def multiply_tasks(
    isa: Isa, weights: Weights, activations: Activations, residual: Buffer | None, y: Buffer
) -> Tasks:
    """y (+ residual), in tasks of a few tiles of the weight, which stay in cache for all tokens."""
    tokens, n = y.shape[0], int(y.shape[1])
    tiles = -(-n // TILE)

    def multiply(tile: Expr, first: Expr, count: Expr | int) -> None:
        sums = weights.dot_tile(isa, tile, activations, partial(add, first), count)

        def finish(valid: int) -> None:
            lanes = isa.lanes if valid == TILE else 1
            with T.serial(0, count) as row:
                for lane in range(0, valid, lanes):
                    value = load(sums, [row * TILE + lane], lanes)
                    _put(y, residual, value, [first + row, tile * TILE + lane])

        for_block(tile, n, TILE, finish)

    def multiply_several(task: Expr) -> None:
        def compute(valid: int) -> None:
            with T.serial(0, (tokens + ROWS - 1) // ROWS) as block, T.serial(0, valid) as i:
                first = T.Bind(block * ROWS)
                count = T.Bind(T.min(tokens - first, T.int64(ROWS)))
                tile = T.Bind(task * _TILES + i)
                with T.serial(0, count) as row:
                    prefetch(y, [first + row, tile * TILE], write=True)
                multiply(tile, first, count)

        for_block(task, tiles, _TILES, compute)

    if is_one(tokens):
        return tiles, lambda tile: multiply(tile, T.int64(0), 1)
    return -(-tiles // _TILES), multiply_several


def _put(y: Buffer, residual: Buffer | None, value: Expr, at: list[Expr]) -> None:
    """Stores value + residual."""
    if residual is not None:
        value = value + load(residual, at, type_of(value)[1])
    store(y, value, at)
