"""What the experts of many tokens put out, for `weighted_sum` to add up.

The (token, expert) pairs are sorted by expert inside the kernel, so that a chunk of a prompt reads
each expert once. A chunk whose experts do not fit in memory together calls the kernel for some of
them after the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from emberd.compile.isa.isa import Isa
from emberd.compile.isa.vector import Buffer, Expr, PrimFunc, kernel, load, prefetch, store
from emberd.compile.kernels.activations import types_suffix
from emberd.compile.kernels.dimensions import Dimension, Scratch, dimension
from emberd.compile.kernels.dot import ROWS
from emberd.compile.kernels.expert_input import declare_input, input_scratch, units_scratch
from emberd.compile.kernels.experts import Experts
from emberd.compile.quantize.activations import Precision
from emberd.compile.quantize.formats import FORMATS, expert_bytes
from tvm.script import tirx as T  # noqa: N812

_PARTS = 4  # of an expert, in tasks that follow one another


def expert_outputs(
    isa: Isa,
    *,
    format: str,
    activations: Precision,
    hidden: int,
    intermediate: int,
    experts: int,
    top_k: int,
) -> PrimFunc:
    """What the experts of any number of tokens put out, as `moe` computes it, not added up yet.

    x f32[T,H], ids i32[T,K], expert_table i32[E], bank u8[S, expert_bytes] -> outputs f32[T*K,H],
    row t * K + k for expert ids[t, k]; scratch. Rows of experts whose table entry is -1 are left as
    they are, so that calls with parts of the experts in the table fill the outputs together.
    """
    weight_format = FORMATS[format]
    size = expert_bytes(weight_format, hidden, intermediate)
    types = types_suffix(format, activations)
    name = f"expert_outputs_{types}_h{hidden}_i{intermediate}_e{experts}_k{top_k}"
    with kernel(name) as builder:
        rows = dimension("tokens")
        x = T.arg("x", T.buffer((rows, hidden), "float32"))
        ids = T.arg("ids", T.buffer((rows, top_k), "int32"))
        table = T.arg("expert_table", T.buffer((experts,), "int32"))
        bank = T.arg("bank", T.buffer((dimension("slots"), T.int64(size)), "uint8"))
        outputs = T.arg("outputs", T.buffer((rows * top_k, hidden), "float32"))
        inputs = declare_input(isa, weight_format, activations, x)
        layer = inputs.routed(bank, rows * top_k, intermediate)
        order = _Order.arguments(rows * top_k, experts)
        with T.sblock("root"):
            with T.parallel(0, rows) as token:
                inputs.prepare(token)
            _compute_pairs(layer, ids, table, outputs, order)
    return builder.get()


def expert_outputs_scratch(
    tokens: int,
    *,
    format: str,
    activations: Precision,
    hidden: int,
    intermediate: int,
    experts: int,
    top_k: int,
) -> Scratch:
    """Scratch of `expert_outputs`."""
    pairs = tokens * top_k
    return [
        *input_scratch(FORMATS[format], activations, tokens, hidden),
        *units_scratch(FORMATS[format], activations, pairs, intermediate),
        *_Order.scratch(pairs, experts),
    ]


@dataclass(frozen=True)
class _Order:
    """Scratch of the sort: pairs (token * top_k + rank) in order of their experts."""

    pairs: Buffer  # int32 [pairs], sorted
    tokens: Buffer  # int32 [pairs]: of each sorted pair, so that inner loops need not divide
    starts: Buffer  # int32 [experts + 1]: where each expert's pairs begin
    cursors: Buffer  # int32 [experts]
    active: Buffer  # int32 [experts]: those with a pair and a slot
    active_count: Buffer  # int32 [1]

    @staticmethod
    def arguments(pairs: Dimension, experts: int) -> _Order:
        return _Order(
            T.arg("order_pairs", T.buffer((pairs,), "int32")),
            T.arg("order_tokens", T.buffer((pairs,), "int32")),
            T.arg("order_starts", T.buffer((experts + 1,), "int32")),
            T.arg("order_cursors", T.buffer((experts,), "int32")),
            T.arg("order_active", T.buffer((experts,), "int32")),
            T.arg("order_active_count", T.buffer((1,), "int32")),
        )

    @staticmethod
    def scratch(pairs: int, experts: int) -> Scratch:
        return [
            ("int32", (pairs,)),
            ("int32", (pairs,)),
            ("int32", (experts + 1,)),
            ("int32", (experts,)),
            ("int32", (experts,)),
            ("int32", (1,)),
        ]

    def sort(self, ids: Buffer, table: Buffer) -> None:
        """A stable counting sort."""
        tokens, top_k = ids.shape[0], int(ids.shape[1])
        experts = int(self.active.shape[0])
        with T.serial(0, experts) as expert:
            store(self.cursors, T.int32(0), [expert])
        with T.serial(0, tokens) as token, T.serial(0, top_k) as rank:
            expert = load(ids, [token, rank], 1)
            store(self.cursors, self.cursors[expert] + 1, [expert])
        store(self.starts, T.int32(0), [0])
        store(self.active_count, T.int32(0), [0])
        with T.serial(0, experts) as expert:
            start = load(self.starts, [expert], 1)
            count = load(self.cursors, [expert], 1)
            store(self.cursors, start, [expert])
            store(self.starts, start + count, [expert + 1])
            with T.If(T.And(count > 0, table[expert] >= 0)), T.Then():
                position = load(self.active_count, [0], 1)
                store(self.active, T.Cast("int32", expert), [position])
                store(self.active_count, position + 1, [0])
        with T.serial(0, tokens) as token, T.serial(0, top_k) as rank:
            expert = load(ids, [token, rank], 1)
            position = load(self.cursors, [expert], 1)
            store(self.pairs, T.Cast("int32", token * top_k + rank), [position])
            store(self.tokens, T.Cast("int32", token), [position])
            store(self.cursors, position + 1, [expert])


def _compute_pairs(
    layer: Experts, ids: Buffer, table: Buffer, outputs: Buffer, order: _Order
) -> None:
    """Sort, hidden units, outputs of every pair whose expert has a slot.

    Tasks go through the experts for a few parts of them after the others: with a few threads, each
    computes the same share of every expert however unevenly the tokens chose, and what it writes
    in a row of the outputs at about the same time lies side by side.
    """
    order.sort(ids, table)
    active_count = load(order.active_count, [0], 1)

    def for_blocks(parts: int, body: Callable[[Expr, Expr, Expr, Expr], None]) -> None:
        """Emits body(slot, part, first, count) for every part of every expert's blocks of rows."""
        together = math.gcd(parts, _PARTS)
        with T.parallel(0, active_count * parts) as task:
            pair = T.Bind(T.truncdiv(task, together))
            run = T.Bind(T.truncdiv(pair, active_count))
            part = T.Bind(run * together + (task - pair * together))
            expert = load(order.active, [pair - run * active_count], 1)
            slot = T.Bind(T.Cast("int64", table[expert]))
            start = load(order.starts, [expert], 1)
            end = load(order.starts, [expert + 1], 1)
            with T.serial(0, T.truncdiv(end - start + (ROWS - 1), ROWS)) as block:
                first = T.Bind(start + block * ROWS)
                body(slot, part, first, T.Bind(T.min(end - first, ROWS)))

    def hidden(slot: Expr, part: Expr, first: Expr, count: Expr) -> None:
        def token(row: Expr) -> Expr:
            return order.tokens[first + row]

        layer.compute_hidden(slot, part, token, lambda row: first + row, count)

    def output(slot: Expr, part: Expr, first: Expr, count: Expr) -> None:
        def put(row: Expr, column: Expr, value: Expr) -> None:
            store(outputs, value, [order.pairs[first + row], column])

        def expect(row: Expr, column: Expr) -> None:
            prefetch(outputs, [order.pairs[first + row], column], write=True)

        layer.compute_output(slot, part, lambda row: first + row, count, put, expect)

    for_blocks(layer.hidden_tasks, hidden)
    for_blocks(layer.output_tasks, output)
