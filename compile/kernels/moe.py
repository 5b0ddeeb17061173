"""Mixture of experts: y = sum over the chosen experts of w * down(silu(gate(x)) * up(x)).

Experts are read where they lie: an id is looked up in a table that gives the expert's slot in the
bank. A shared expert, which every token passes, is computed beside them, and the end of the layer
after them: y = residual + sigmoid(shared_expert_gate x) * shared(x) + routed.
This kernel is for one token, of which every expert is one stream of memory; many tokens are
computed by `shared_expert`, `expert_outputs` and `weighted_sum`, bit for bit as one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from emberd.compile.isa.isa import Isa
from emberd.compile.isa.vector import Buffer, Expr, PrimFunc, kernel, store
from emberd.compile.kernels.activations import types_suffix
from emberd.compile.kernels.dimensions import (
    Scratch,
    Tasks,
    dimension,
    dispatch,
    parallel_unless_small,
    token_suffix,
)
from emberd.compile.kernels.expert_input import declare_input, input_scratch, units_scratch
from emberd.compile.kernels.experts import Experts
from emberd.compile.kernels.shared_expert import SharedExpert, SharedWeights
from emberd.compile.kernels.weighted_sum import SharedOutput, sum_token
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
    shared: int | None,
) -> PrimFunc:
    """The experts' part of a layer, for one token; with a shared expert of `shared` hidden units,
    which has the same format, the layer's end as well.

    x f32[1,H], ids i32[1,K], weights f32[1,K], (the weights of `shared_expert`, residual f32[1,H]),
    expert_table i32[E], bank u8[S, expert_bytes] -> y f32[1,H]; scratch.

    Ids are trusted to be in 0..E-1, table entries in 0..S-1. Experts are added in order of k. In q8
    and q4, x and the hidden units are quantised to `activations`; in f32 that is float32.
    EmberdError when the format cannot take the dimensions.
    """
    weight_format = FORMATS[format]
    size = expert_bytes(weight_format, hidden, intermediate)
    types = types_suffix(format, activations)
    name = f"moe_{types}_h{hidden}_i{intermediate}_e{experts}_k{top_k}"
    if shared is not None:
        name += f"_s{shared}"
    with kernel(f"{name}_{token_suffix(1)}") as builder:
        x = T.arg("x", T.buffer((1, hidden), "float32"))
        ids = T.arg("ids", T.buffer((1, top_k), "int32"))
        weights = T.arg("weights", T.buffer((1, top_k), "float32"))
        extra = None if shared is None else SharedWeights.declare(format, hidden, shared)
        residual = T.arg("residual", T.buffer((1, hidden), "float32")) if extra else None
        table = T.arg("expert_table", T.buffer((experts,), "int32"))
        bank = T.arg("bank", T.buffer((dimension("slots"), T.int64(size)), "uint8"))
        y = T.arg("y", T.buffer((1, hidden), "float32"))
        inputs = declare_input(isa, weight_format, activations, x)
        routed = inputs.routed(bank, top_k, intermediate)
        outputs = T.arg("outputs", T.buffer((top_k, hidden), "float32"))
        layer = end = None
        if extra is not None:
            scales = T.arg("shared_scales", T.buffer((1, 1), "float32"))
            output = T.arg("shared_output", T.buffer((1, hidden), "float32"))
            layer = SharedExpert(isa, x, extra, extra.expert(inputs, 1), scales, output)
            end = SharedOutput(scales, output, residual)
        with T.sblock("root"):
            inputs.prepare(T.int32(0))
            _compute_experts(routed, layer, ids, table, outputs)
            sum_token(isa, outputs, weights, end, T.int32(0), y)
    return builder.get()


def moe_scratch(
    *,
    format: str,
    activations: Precision,
    hidden: int,
    intermediate: int,
    top_k: int,
    shared: int | None,
) -> Scratch:
    """Scratch of `moe`."""
    weight_format = FORMATS[format]
    scratch = [
        *input_scratch(weight_format, activations, 1, hidden),
        *units_scratch(weight_format, activations, top_k, intermediate),
        ("float32", (top_k, hidden)),
    ]
    if shared is not None:
        scratch += [("float32", (1, 1)), ("float32", (1, hidden))]
        scratch += units_scratch(weight_format, activations, 1, shared)
    return scratch


def _compute_experts(
    routed: Experts, shared: SharedExpert | None, ids: Buffer, table: Buffer, outputs: Buffer
) -> None:
    """Two parallel regions: hidden units of all experts, then their outputs.

    In both, tasks go through one expert after the other, so that few threads read few streams.
    """
    top_k = int(ids.shape[1])

    def slot(rank: Expr) -> Expr:
        return T.Bind(T.Cast("int64", table[ids[0, rank]]))

    def hidden(task: Expr) -> None:
        rank = T.Bind(task // routed.hidden_tasks)
        part = T.Bind(task % routed.hidden_tasks)
        routed.compute_hidden(slot(rank), part, lambda row: row, lambda row: rank + row, 1)

    def output(task: Expr) -> None:
        rank = T.Bind(task // routed.output_tasks)
        part = T.Bind(task % routed.output_tasks)

        def put(row: Expr, column: Expr, value: Expr) -> None:
            store(outputs, value, [rank + row, column])

        routed.compute_output(slot(rank), part, lambda row: rank + row, 1, put)

    units = top_k * routed.intermediate
    hidden_parts: list[Tasks] = [(top_k * routed.hidden_tasks, hidden)]
    output_parts: list[Tasks] = [(top_k * routed.output_tasks, output)]
    if shared is not None:
        units += shared.expert.intermediate
        hidden_parts.append((shared.expert.hidden_tasks, partial(shared.compute_hidden, 0, 1)))
        hidden_parts.append((1, lambda _task: shared.compute_scale(T.int32(0))))
        output_parts.append((shared.expert.output_tasks, partial(shared.compute_output, 0, 1)))
    for weights_read, parts in (
        (2 * units * routed.hidden, hidden_parts),
        (units * routed.hidden, output_parts),
    ):
        count = sum(number for number, _body in parts)
        with parallel_unless_small(count, weights_read // count) as task:
            dispatch(task, parts)
