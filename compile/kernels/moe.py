"""Mixture of experts: y = sum over the chosen experts of w * down(silu(gate(x)) * up(x)).

Experts are read where they lie: an id is looked up in a table that gives the expert's slot in the
bank. For one token every chosen expert is one stream of memory. For many, the (token, expert) pairs
are sorted by expert inside the kernel, so that a chunk of a prompt reads each expert once, and the
weighted sum is a kernel of its own: so a chunk whose experts do not fit in memory together calls
the first kernel for some of them after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from emberd.compile.isa.isa import Isa
from emberd.compile.isa.vector import (
    Buffer,
    Expr,
    PrimFunc,
    kernel,
    load,
    prefetch,
    store,
)
from emberd.compile.kernels.activations import types_suffix
from emberd.compile.kernels.dimensions import (
    Dimension,
    Scratch,
    dimension,
    parallel_unless_small,
    token_suffix,
)
from emberd.compile.kernels.dot import ROWS
from emberd.compile.kernels.experts import Experts, declare_experts, experts_scratch
from emberd.compile.kernels.weighted_sum import sum_token
from emberd.compile.quantize.activations import Precision
from emberd.compile.quantize.formats import FORMATS, expert_bytes
from numpy.typing import NDArray
from tvm.script import tirx as T  # noqa: N812

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]


def reference(
    x: Floats,
    ids: Ints,
    weights: Floats,
    gate_up: Floats,
    down: Floats,
    quantise: Callable[[Floats], Floats],
) -> Floats:
    """x [T, H], ids and weights [T, K], gate_up [E, 2I, H] (gate first), down [E, H, I] -> [T, H].

    `quantise` is applied to every matrix input: `quantise_reference` of the activations.
    """
    y = np.zeros(x.shape, np.float64)
    inputs = quantise(x).astype(np.float64)
    for token, rank in np.ndindex(ids.shape):
        expert = ids[token, rank]
        gate, up = np.split(gate_up[expert] @ inputs[token], 2)
        hidden = (gate / (1 + np.exp(-gate)) * up).astype(np.float32)
        y[token] += weights[token, rank] * (down[expert] @ quantise(hidden[None])[0])
    return y.astype(np.float32)


def moe(
    isa: Isa,
    *,
    format: str,
    activations: Precision,
    hidden: int,
    intermediate: int,
    experts: int,
    top_k: int,
) -> PrimFunc:
    """The experts' part of a layer, for one token.

    x f32[1,H], ids i32[1,K], weights f32[1,K], expert_table i32[E], bank u8[S, expert_bytes]
    -> y f32[1,H]; scratch. Ids are trusted to be in 0..E-1, table entries in 0..S-1. Experts are
    added in order of k. In q8 and q4, x and the hidden units are quantised to `activations`; in f32
    that is float32. EmberdError when the format cannot take the dimensions.
    """
    weight_format = FORMATS[format]
    size = expert_bytes(weight_format, hidden, intermediate)
    types = types_suffix(format, activations)
    name = f"moe_{types}_h{hidden}_i{intermediate}_e{experts}_k{top_k}_{token_suffix(1)}"
    with kernel(name) as builder:
        x = T.arg("x", T.buffer((1, hidden), "float32"))
        ids = T.arg("ids", T.buffer((1, top_k), "int32"))
        weights = T.arg("weights", T.buffer((1, top_k), "float32"))
        table = T.arg("expert_table", T.buffer((experts,), "int32"))
        bank = T.arg("bank", T.buffer((dimension("slots"), T.int64(size)), "uint8"))
        y = T.arg("y", T.buffer((1, hidden), "float32"))
        layer = declare_experts(isa, weight_format, activations, x, bank, top_k, intermediate)
        outputs = T.arg("outputs", T.buffer((top_k, hidden), "float32"))
        with T.sblock("root"):
            _one_token(isa, layer, ids, weights, table, outputs, y)
    return builder.get()


def moe_scratch(
    *, format: str, activations: Precision, hidden: int, intermediate: int, top_k: int
) -> Scratch:
    """Scratch of `moe`."""
    scratch = experts_scratch(FORMATS[format], activations, 1, top_k, hidden, intermediate)
    return [*scratch, ("float32", (top_k, hidden))]


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
        layer = declare_experts(
            isa, weight_format, activations, x, bank, rows * top_k, intermediate
        )
        order = _Order.arguments(rows * top_k, experts)
        with T.sblock("root"):
            _many_tokens(layer, ids, table, outputs, order)
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
    scratch = experts_scratch(FORMATS[format], activations, tokens, pairs, hidden, intermediate)
    return [*scratch, *_Order.scratch(pairs, experts)]


def _one_token(
    isa: Isa,
    layer: Experts,
    ids: Buffer,
    weights: Buffer,
    table: Buffer,
    outputs: Buffer,
    y: Buffer,
) -> None:
    """Two parallel regions: hidden units of all chosen experts, then outputs; then their sum.

    In both, tasks go through one expert after the other, so that few threads read few streams.
    """
    top_k, weights_read = int(ids.shape[1]), int(ids.shape[1]) * layer.hidden * layer.intermediate
    hidden_tasks = top_k * layer.hidden_tasks

    def slot(rank: Expr) -> Expr:
        return T.Bind(T.Cast("int64", table[ids[0, rank]]))

    layer.prepare(T.int32(0))
    with parallel_unless_small(hidden_tasks, 2 * weights_read // hidden_tasks) as task:
        rank = T.Bind(task // layer.hidden_tasks)
        part = T.Bind(task % layer.hidden_tasks)
        layer.compute_hidden(slot(rank), part, lambda row: row, lambda row: rank + row, 1)
    output_tasks = top_k * layer.output_tasks
    with parallel_unless_small(output_tasks, weights_read // output_tasks) as task:
        rank = T.Bind(task // layer.output_tasks)
        part = T.Bind(task % layer.output_tasks)

        def put(row: Expr, column: Expr, value: Expr) -> None:
            store(outputs, value, [rank + row, column])

        layer.compute_output(slot(rank), part, lambda row: rank + row, 1, put)
    sum_token(isa, outputs, weights, T.int32(0), y)


@dataclass(frozen=True)
class _Order:
    """Scratch of the sort: pairs (token * top_k + rank) in order of their experts."""

    pairs: Buffer  # int32 [pairs], sorted
    starts: Buffer  # int32 [experts + 1]: where each expert's pairs begin
    cursors: Buffer  # int32 [experts]
    active: Buffer  # int32 [experts]: those with a pair and a slot
    active_count: Buffer  # int32 [1]

    @staticmethod
    def arguments(pairs: Dimension, experts: int) -> _Order:
        return _Order(
            T.arg("order_pairs", T.buffer((pairs,), "int32")),
            T.arg("order_starts", T.buffer((experts + 1,), "int32")),
            T.arg("order_cursors", T.buffer((experts,), "int32")),
            T.arg("order_active", T.buffer((experts,), "int32")),
            T.arg("order_active_count", T.buffer((1,), "int32")),
        )

    @staticmethod
    def scratch(pairs: int, experts: int) -> Scratch:
        return [
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
            store(self.cursors, position + 1, [expert])


def _many_tokens(
    layer: Experts, ids: Buffer, table: Buffer, outputs: Buffer, order: _Order
) -> None:
    """Sort, hidden units, outputs of every pair whose expert has a slot.

    Tasks go through the experts for one part of them after the other: with a few threads, each
    computes the same share of every expert however unevenly the tokens chose.
    """
    tokens, top_k = ids.shape[0], int(ids.shape[1])
    with T.parallel(0, tokens) as token:
        layer.prepare(token)
    order.sort(ids, table)
    active_count = load(order.active_count, [0], 1)

    def for_blocks(parts: int, body: Callable[[Expr, Expr, Expr, Expr], None]) -> None:
        """Emits body(slot, part, first, count) for every part of every expert's blocks of rows."""
        with T.parallel(0, active_count * parts) as task:
            part = T.Bind(T.truncdiv(task, active_count))
            expert = load(order.active, [task - part * active_count], 1)
            slot = T.Bind(T.Cast("int64", table[expert]))
            start = load(order.starts, [expert], 1)
            end = load(order.starts, [expert + 1], 1)
            with T.serial(0, T.truncdiv(end - start + (ROWS - 1), ROWS)) as block:
                first = T.Bind(start + block * ROWS)
                body(slot, part, first, T.Bind(T.min(end - first, ROWS)))

    def hidden(slot: Expr, part: Expr, first: Expr, count: Expr) -> None:
        def token(row: Expr) -> Expr:
            return T.truncdiv(order.pairs[first + row], top_k)

        layer.compute_hidden(slot, part, token, lambda row: first + row, count)

    def output(slot: Expr, part: Expr, first: Expr, count: Expr) -> None:
        def put(row: Expr, column: Expr, value: Expr) -> None:
            store(outputs, value, [order.pairs[first + row], column])

        def expect(row: Expr, column: Expr) -> None:
            prefetch(outputs, [order.pairs[first + row], column], write=True)

        layer.compute_output(slot, part, lambda row: first + row, count, put, expect)

    for_blocks(layer.hidden_tasks, hidden)
    for_blocks(layer.output_tasks, output)
