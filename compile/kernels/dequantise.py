"""A row of a packed q8 or q4 matrix as the float32 numbers that it stands for."""

from __future__ import annotations

from collections.abc import Callable

from emberd.compile.isa.isa import Isa
from emberd.compile.isa.vector import Expr, broadcast
from emberd.compile.quantize.formats import BLOCK, GROUP, SCALE_BYTES, TILE, GroupFormat
from tvm.script import tirx as T  # noqa: N812

LoadBytes = Callable[[Expr, int], Expr]
"""(offset, count): that many bytes of the matrix from an int64 offset on."""

Put = Callable[[Expr, Expr], None]
"""(column, float32x4): takes four columns of the row."""


def dequantise_row(
    isa: Isa, weight_format: GroupFormat, row: Expr, columns: int, load_bytes: LoadBytes, put: Put
) -> None:
    """Emits puts of all columns of row `row` (int64) of a matrix that `Format.pack` packed.

    The row lies in its tile as quadruples of columns, 4 * 16 columns' bytes apart.
    """
    tile = T.Bind(T.truncdiv(row, T.int64(TILE)))
    line = T.Bind(row - tile * TILE)
    quads = weight_format.group_bytes // (4 * TILE)
    with T.serial(0, columns // GROUP) as group:
        block = T.Bind(group // (BLOCK // GROUP))
        half = T.Bind(group % (BLOCK // GROUP))
        base = T.Bind(
            tile * T.int64(weight_format.tile_bytes(columns)) + block * weight_format.block_bytes
        )
        scale_bits = load_bytes(base + (half * TILE + line) * 2, 2)
        scale = T.Bind(isa.half_to_float(T.reinterpret("uint16", scale_bits)))
        first = T.Bind(base + SCALE_BYTES + half * weight_format.group_bytes + line * 4)
        with T.serial(0, quads) as j:
            packed = load_bytes(first + j * (4 * TILE), 4)

            def put_numbers(integers: Expr, column: Expr) -> None:
                zero_point = broadcast(T.int32(weight_format.zero_point), 4)
                signed = T.Cast("int32x4", integers) - zero_point
                put(group * GROUP + column, T.Cast("float32x4", signed) * broadcast(scale, 4))

            if weight_format.bits == 4:
                put_numbers(packed & T.broadcast(T.uint8(15), 4), j * 4)
                high = T.shift_right(packed, T.broadcast(T.uint8(4), 4))
                put_numbers(high, j * 4 + GROUP // 2)
            else:
                put_numbers(packed, j * 4)
