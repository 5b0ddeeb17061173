"""Embedding: the rows of a vocabulary matrix, in f32, q8 or q4, that the tokens name."""

from __future__ import annotations

import numpy as np
from emberd.compile.isa.isa import Isa
from emberd.compile.isa.vector import (
    Buffer,
    Expr,
    PrimFunc,
    for_vectors,
    kernel,
    load,
    store,
)
from emberd.compile.kernels.dequantise import dequantise_row
from emberd.compile.kernels.dimensions import Scratch, dimension, token_suffix
from emberd.compile.quantize.formats import FORMATS, GroupFormat
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
                dequantise_row(
                    isa,
                    weight_format,
                    token,
                    hidden,
                    lambda offset, count: load(table, [offset], count),
                    lambda column, numbers: store(output, numbers, [row, column]),
                )
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
