"""Gather of experts: a copy of one matrix of every chosen expert, dequantised to float32.

This is what a mixture costs without `moa_fusion`: the weights of the chosen experts are written out
before anything multiplies by them.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from emberd.compile.isa.isa import Isa
from emberd.compile.isa.vector import (
    Expr,
    PrimFunc,
    for_vectors,
    kernel,
    load,
    store,
    vector_type,
)
from emberd.compile.kernels.dequantise import dequantise_row
from emberd.compile.kernels.dimensions import dimension, token_suffix
from emberd.compile.quantize.formats import FORMATS, GROUP, GroupFormat, expert_bytes
from numpy.typing import NDArray
from tvm.script import tirx as T  # noqa: N812

Matrix = Literal["gate_up", "down"]


def reference(ids: NDArray[np.int32], experts: NDArray[np.float32]) -> NDArray[np.float32]:
    """ids [T, K], one matrix of every expert [E, N, C] (unpacked) -> [T, K, N, C]."""
    return experts[ids]


def gather_experts(
    isa: Isa,
    *,
    format: str,
    matrix: Matrix,
    hidden: int,
    intermediate: int,
    experts: int,
    top_k: int,
    tokens: int | None,
) -> PrimFunc:
    """ids i32[T,K], expert_table i32[E], bank u8[S, expert_bytes] -> gathered f32[T,K,N,C].

    [N, C] is [2I, H] (gate first) for the matrix gate_up, [H, I] for down. Ids are trusted to be in
    0..E-1, table entries in 0..S-1. EmberdError when the format cannot take the dimensions.
    """
    weight_format = FORMATS[format]
    blob = T.int64(expert_bytes(weight_format, hidden, intermediate))
    rows, columns, start = 2 * intermediate, hidden, 0
    if matrix == "down":
        start = weight_format.packed_bytes(rows, columns)
        rows, columns = hidden, intermediate
    name = (
        f"gather_experts_{format}_{matrix}_h{hidden}_i{intermediate}_e{experts}_k{top_k}"
        f"_{token_suffix(tokens)}"
    )
    with kernel(name) as builder:
        count = dimension("tokens", tokens)
        ids = T.arg("ids", T.buffer((count, top_k), "int32"))
        table = T.arg("expert_table", T.buffer((experts,), "int32"))
        bank = T.arg("bank", T.buffer((dimension("slots"), blob), "uint8"))
        gathered = T.arg("gathered", T.buffer((count, top_k, rows, columns), "float32"))
        with T.sblock("root"), T.parallel(0, count * (top_k * rows)) as task:
            pair = T.Bind(T.truncdiv(task, rows))
            row = T.Bind(T.Cast("int64", task - pair * rows))
            token = T.Bind(T.truncdiv(pair, top_k))
            rank = T.Bind(pair - token * top_k)
            slot = T.Bind(T.Cast("int64", table[ids[token, rank]]))

            def load_bytes(offset: Expr, count: int) -> Expr:
                return load(bank, [slot, offset + start], count)

            def put(column: Expr, numbers: Expr) -> None:
                store(gathered, numbers, [token, rank, row, column])

            def copy(column: Expr, lanes: int) -> None:
                values = load_bytes((row * columns + column) * 4, 4 * lanes)
                put(column, T.reinterpret(vector_type("float32", lanes), values))

            if isinstance(weight_format, GroupFormat):
                packed_row = row if matrix == "down" else _packed_row(row, intermediate)
                dequantise_row(isa, weight_format, packed_row, columns, load_bytes, put)
            else:
                for_vectors(columns, isa.lanes, copy)
    return builder.get()


def _packed_row(row: Expr, intermediate: int) -> Expr:
    """Where `pack_expert` puts a row of gate_up: runs of 32 rows of gate and of up alternate."""
    half = T.Bind(T.truncdiv(row, T.int64(intermediate)))
    unit = T.Bind(row - half * intermediate)
    run = T.Bind(T.truncdiv(unit, T.int64(GROUP)))
    return T.Bind(unit + (run + half) * GROUP)
