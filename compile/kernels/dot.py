"""Dot products of weight rows with token rows: the inner loops that linear and moe share.

Every function computes a token's row by the same operations in the same order whatever the number
of rows around it, so results do not depend on how a prompt is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from emberd.compile.isa.isa import Isa
from emberd.compile.isa.math import Register
from emberd.compile.isa.vector import (
    Buffer,
    Expr,
    broadcast,
    constant,
    for_block,
    load,
    multiply_add,
    prefetch,
    stack_buffer,
    store,
    sum_lanes,
    vector_type,
)
from emberd.compile.kernels.activations import Activations
from emberd.compile.kernels.dimensions import Dimension, parallel_unless_small
from emberd.compile.quantize.formats import GROUP, SCALE_BYTES, TILE, GroupFormat
from tvm.script import tirx as T  # noqa: N812
from tvm.tirx import IntImm

ROWS = 8
"""Most token rows that one pass over a weight tile serves: more would not be faster."""

RowMap = Callable[[Expr], Expr]
"""Number of a row in a block -> its row in a buffer."""

_FLOAT_ROWS = 4  # weight rows in f32 that one pass over token rows serves
_CACHE_LINE = 64  # bytes
_BLOCKS_AHEAD = 8  # of weights, asked for while the present one is multiplied


@dataclass(frozen=True)
class Weights:
    """A packed q4 or q8 matrix inside a byte buffer."""

    format: GroupFormat
    columns: int
    buffer: Buffer  # uint8, one-dimensional or [experts, bytes]
    prefix: tuple[Expr, ...] = ()  # index of the expert
    offset: int = 0  # of the matrix, in bytes

    def dot_tile(
        self, isa: Isa, tile: Expr, activations: Activations, source: RowMap, count: Expr | int
    ) -> Buffer:
        """Dot products of the 16 rows of a tile with `count` (at most ROWS) activation rows.

        Returns a stack buffer float32 [ROWS * 16]: row i belongs to activation row source(i).
        """
        sums = stack_buffer(ROWS * TILE)
        with T.serial(0, count) as row, T.serial(0, TILE // isa.lanes) as part:
            store(sums, constant(0.0, isa.lanes), [row * TILE + part * isa.lanes])
        groups = self.columns // GROUP
        start = T.Bind(
            T.Cast("int64", tile) * T.int64(self.format.tile_bytes(self.columns))
            + T.int64(self.offset)
        )
        with T.serial(0, (groups + 1) // 2) as number:
            block = T.Bind(start + number * self.format.block_bytes)
            if not is_one(count):
                self._prefetch(block)
            halves = 2 if groups % 2 == 0 else T.min(2, groups - number * 2)
            with T.serial(0, halves) as half, T.serial(0, TILE // isa.lanes) as part:
                group, lane = T.Bind(number * 2 + half), T.Bind(part * isa.lanes)
                scales = self._scales(isa, block, half, lane)
                integers = self._integers(isa, block, half, lane)
                if not is_one(count):
                    integers = list(integers)
                with T.serial(0, count) as row:
                    token = T.Bind(source(row))
                    products = _multiply_group(isa, integers, activations, token, group)
                    scale = scales * broadcast(activations.scales[token, group], isa.lanes)
                    position = [row * TILE + lane]
                    total = multiply_add(products, scale, load(sums, position, isa.lanes))
                    store(sums, total, position)
        return sums

    def _scales(self, isa: Isa, block: Expr, half: Expr, lane: Expr) -> Expr:
        """Of a group of columns, float32, for `lanes` rows from row `lane` of the tile on.

        `block`: byte offset of the group's block; `half`: which group of the block it is.
        """
        bits = self._load(block + (half * TILE + lane) * 2, 2 * isa.lanes)
        return T.Bind(isa.half_to_float(T.reinterpret(vector_type("uint16", isa.lanes), bits)))

    def _integers(self, isa: Isa, block: Expr, half: Expr, lane: Expr) -> Iterable[Expr]:
        """Eight vectors uint8 with four columns of each row.

        Those of q8 are loaded one by one as they are taken: with all loads of a group together
        before the work, a single token reads memory at four fifths of the speed.
        """
        start = T.Bind(block + half * self.format.group_bytes + lane * 4 + SCALE_BYTES)
        chunks = (
            self._load(start + 4 * TILE * j, 4 * isa.lanes)
            for j in range(self.format.group_bytes // (4 * TILE))
        )
        return _nibbles(list(chunks), isa.lanes) if self.format.bits == 4 else chunks

    def _prefetch(self, block: Expr) -> None:
        """With several rows, loads are too far apart for the hardware to keep memory busy."""
        for line in range(0, self.format.block_bytes, _CACHE_LINE):
            ahead = block + _BLOCKS_AHEAD * self.format.block_bytes + line
            prefetch(self.buffer, [*self.prefix, ahead])

    def _load(self, offset: Expr, count: int) -> Expr:
        return load(self.buffer, [*self.prefix, offset], count)


def _multiply_group(
    isa: Isa, integers: Iterable[Expr], activations: Activations, row: Expr, group: Expr
) -> Expr:
    """The dot product of one group with one activation row, as float32."""
    planes = activations.planes(row, group)
    bias = load(activations.biases, [row, group], 1)
    products = isa.dot_group(activations.zero_point, integers, planes, bias)
    return T.Bind(T.Cast(vector_type("float32", isa.lanes), products))


def _nibbles(chunks: list[Expr], lanes: int) -> list[Expr]:
    """Low nibbles of all the chunks, then high nibbles: columns in order."""
    words, bytes_ = vector_type("uint32", lanes), vector_type("uint8", 4 * lanes)
    low = [T.Bind(chunk & T.broadcast(T.uint8(15), 4 * lanes)) for chunk in chunks]
    high = [
        T.Bind(
            T.reinterpret(
                bytes_,
                T.shift_right(T.reinterpret(words, chunk), broadcast(T.uint32(4), lanes))
                & broadcast(T.uint32(0x0F0F0F0F), lanes),
            )
        )
        for chunk in chunks
    ]
    return low + high


FloatRow = Callable[[Expr, int], Expr]
"""A row of weights: (column, lanes) -> that many float32."""


def float_row(weight: Buffer, row: Expr | int) -> FloatRow:
    """Row `row` of weight f32[N, K]."""
    return lambda column, lanes: load(weight, [row, column], lanes)


def dot_float_rows(
    isa: Isa, rows: Sequence[FloatRow], x: Buffer, tokens: Sequence[Expr]
) -> list[list[Expr]]:
    """Dot products of a few float32 weight rows with a few rows of x: scalars [token][row].

    One vector accumulator for each of them, then its lanes pairwise, then the columns that do not
    fill a vector one by one.
    """
    columns, lanes = int(x.shape[1]), isa.lanes
    sums = [[Register(constant(0.0, lanes)) for _ in rows] for _ in tokens]
    whole = columns // lanes * lanes
    with T.serial(0, whole // lanes) as step:
        weights = [row(step * lanes, lanes) for row in rows]
        for token, accumulators in zip(tokens, sums, strict=True):
            values = load(x, [token, step * lanes], lanes)
            for factor, accumulator in zip(weights, accumulators, strict=True):
                accumulator.add_product(factor, values)
    totals = [[Register(sum_lanes(a.value)) for a in accumulators] for accumulators in sums]
    with T.serial(whole, columns) as column:
        weights = [row(column, 1) for row in rows]
        for token, accumulators in zip(tokens, totals, strict=True):
            for factor, accumulator in zip(weights, accumulators, strict=True):
                accumulator.add_product(factor, load(x, [token, column], 1))
    return [[a.value for a in accumulators] for accumulators in totals]


Put = Callable[[Expr, list[Expr]], None]
"""(value, [token, row]): takes a dot product."""


def dot_float(isa: Isa, weight: Buffer, x: Buffer, put: Put) -> None:
    """All dot products of x f32[T, K] and weight f32[N, K]."""
    tokens = x.shape[0]
    elements = float_block_rows(tokens) * int(weight.shape[1])
    with over_weights(float_blocks(weight, tokens), elements, tokens) as block:
        dot_float_block(isa, weight, x, block, put)


def float_block_rows(tokens: Dimension) -> int:
    """A few weight rows stay in cache for all tokens; a single token takes one, so that a thread
    reads one stream."""
    return 1 if is_one(tokens) else _FLOAT_ROWS


def float_blocks(weight: Buffer, tokens: Dimension) -> int:
    """Blocks of rows of a weight f32[N, K]."""
    return -(-int(weight.shape[0]) // float_block_rows(tokens))


def dot_float_block(isa: Isa, weight: Buffer, x: Buffer, block: Expr, put: Put) -> None:
    """Dot products of all tokens, two at a time, with one block of weight rows."""
    tokens = x.shape[0]
    size = float_block_rows(tokens)

    def dot(valid: int) -> None:
        rows = [T.Bind(T.Cast("int64", block) * size + i) for i in range(valid)]
        weights = [float_row(weight, row) for row in rows]

        def dot_tokens(*numbers: Expr) -> None:
            sums = dot_float_rows(isa, weights, x, numbers)
            for token, values in zip(numbers, sums, strict=True):
                for row, value in zip(rows, values, strict=True):
                    put(value, [token, row])

        with T.serial(0, tokens // 2) as pair:
            dot_tokens(T.Bind(pair * 2), T.Bind(pair * 2 + 1))
        with T.serial(tokens // 2 * 2, tokens) as token:
            dot_tokens(token)

    for_block(block, int(weight.shape[0]), size, dot)


def over_weights(tasks: int, elements: int, tokens: Dimension) -> Any:
    """A loop over tasks that each apply `elements` weights to all tokens: parallel unless small."""
    if isinstance(tokens, int | IntImm):
        return parallel_unless_small(tasks, elements * int(tokens))
    return T.parallel(0, tasks)


def is_one(dimension: Dimension) -> bool:
    return isinstance(dimension, int | IntImm) and int(dimension) == 1
