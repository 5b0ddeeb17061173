"""Embedding: the rows of a vocabulary matrix, in f32, q8 or q4, that the tokens name."""

from __future__ import annotations

import numpy as np
from emberd.compile.isa.isa import Isa
from emberd.compile.isa.vector import (
    Buffer,
    Expr,
    PrimFunc,
    broadcast,
    for_vectors,
    kernel,
    load,
    store,
)
from emberd.compile.kernels.dimensions import Scratch, dimension, token_suffix
from emberd.compile.quantize.formats import BLOCK, FORMATS, GROUP, SCALE_BYTES, TILE, GroupFormat
from numpy.typing import NDArray
from tvm.script import tirx as T  # noqa: N812


def reference(tokens: NDArray[np.int32], table: NDArray[np.float32]) -> NDArray[np.float32]:
    """tokens [T], table [V, H] (unpacked) -> hidden [T, H]."""
    return table[tokens]


def embedding(
    isa: Isa, *, format: str, vocabulary: int, hidden: int, tokens: int | None
) -> PrimFunc:
    """tokens i32[T], table (f32[V,H] or u8[packed]) -> hidden f32[T,H].

    The tokens are trusted to be in 0..V-1. EmberdError when the format cannot take the dimensions.
    """
    weight_format = FORMATS[format]
    weight_format.check(vocabulary, hidden)
    name = f"embedding_{format}_v{vocabulary}_h{hidden}_{token_suffix(tokens)}"
    with kernel(name) as builder:
        rows = dimension("tokens", tokens)
        ids = T.arg("tokens", T.buffer((rows,), "int32"))
        if isinstance(weight_format, GroupFormat):
            size = T.int64(weight_format.packed_bytes(vocabulary, hidden))
            table = T.arg("table", T.buffer((size,), "uint8"))
        else:
            table = T.arg("table", T.buffer((vocabulary, hidden), "float32"))
        output = T.arg("hidden", T.buffer((rows, hidden), "float32"))
        with T.sblock("root"), T.parallel(0, rows) as row:
            token = T.Bind(T.Cast("int64", ids[row]))
            if isinstance(weight_format, GroupFormat):
                _dequantise(isa, weight_format, table, token, output, row)
            else:
                _copy(isa, table, token, output, row)
    return builder.get()


def embedding_scratch(tokens: int, *, format: str, vocabulary: int, hidden: int) -> Scratch:
    """None is needed."""
    return []


def _copy(isa: Isa, table: Buffer, token: Expr, output: Buffer, row: Expr) -> None:
    def copy(column: Expr, lanes: int) -> None:
        store(output, load(table, [token, column], lanes), [row, column])

    for_vectors(int(output.shape[1]), isa.lanes, copy)


def _dequantise(
    isa: Isa, weight_format: GroupFormat, table: Buffer, token: Expr, output: Buffer, row: Expr
) -> None:
    """The row lies in its tile as quadruples of columns, 4 * 16 columns' bytes apart."""
    hidden = int(output.shape[1])
    tile = T.Bind(T.truncdiv(token, T.int64(TILE)))
    line = T.Bind(token - tile * TILE)
    quads = weight_format.group_bytes // (4 * TILE)
    with T.serial(0, hidden // GROUP) as group:
        block = T.Bind(group // (BLOCK // GROUP))
        half = T.Bind(group % (BLOCK // GROUP))
        base = T.Bind(
            tile * T.int64(weight_format.tile_bytes(hidden)) + block * weight_format.block_bytes
        )
        scale_bits = load(table, [base + (half * TILE + line) * 2], 2)
        scale = T.Bind(isa.half_to_float(T.reinterpret("uint16", scale_bits)))
        first = T.Bind(base + SCALE_BYTES + half * weight_format.group_bytes + line * 4)
        with T.serial(0, quads) as j:
            packed = load(table, [first + j * (4 * TILE)], 4)

            def put(values: Expr, column: Expr) -> None:
                signed = T.Cast("int32x4", values) - broadcast(T.int32(weight_format.zero_point), 4)
                number = T.Cast("float32x4", signed) * broadcast(scale, 4)
                store(output, number, [row, group * GROUP + column])

            if weight_format.bits == 4:
                put(packed & T.broadcast(T.uint8(15), 4), j * 4)
                put(T.shift_right(packed, T.broadcast(T.uint8(4), 4)), j * 4 + GROUP // 2)
            else:
                put(packed, j * 4)
