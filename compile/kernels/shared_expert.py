"""The expert that every token passes, and the sigmoid gate that scales it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from emberd.compile.isa.isa import Isa
from emberd.compile.isa.math import sigmoid
from emberd.compile.isa.vector import (
    Buffer,
    Expr,
    PrimFunc,
    kernel,
    store,
)
from emberd.compile.kernels.activations import types_suffix
from emberd.compile.kernels.dimensions import Dimension, Scratch, dimension
from emberd.compile.kernels.dot import ROWS, dot_float_rows, float_row
from emberd.compile.kernels.expert_input import (
    ExpertInput,
    declare_input,
    input_scratch,
    units_scratch,
)
from emberd.compile.kernels.experts import Experts
from emberd.compile.kernels.linear import weight_argument
from emberd.compile.quantize.activations import Precision
from emberd.compile.quantize.formats import FORMATS
from numpy.typing import NDArray
from tvm.script import tirx as T  # noqa: N812

Floats = NDArray[np.float32]

_TASK_BLOCKS = 8  # of rows: one after the other they use the weights of a task


def reference(
    x: Floats,
    gate: Floats,
    up: Floats,
    down: Floats,
    expert_gate: Floats,
    quantise: Callable[[Floats], Floats],
) -> tuple[Floats, Floats]:
    """x [T, H], gate and up [S, H], down [H, S], expert_gate [1, H] -> scales [T, 1], y [T, H].

    `quantise` is applied to what gate, up and down multiply.
    """
    inputs = quantise(x).astype(np.float64)
    gated = inputs @ gate.T
    units = (gated / (1 + np.exp(-gated)) * (inputs @ up.T)).astype(np.float32)
    scales = 1 / (1 + np.exp(-(x.astype(np.float64) @ expert_gate.T)))
    return scales.astype(np.float32), (quantise(units) @ down.T).astype(np.float32)


def shared_expert(
    isa: Isa, *, format: str, activations: Precision, hidden: int, width: int
) -> PrimFunc:
    """x f32[T,H], gate and up weights [S,H], down weight [H,S], expert_gate f32[1,H]
    -> scales f32[T,1] = sigmoid(expert_gate x), y f32[T,H] = down(silu(gate x) * (up x)); scratch.

    S is the `width`. In q8 and q4, x and the hidden units are quantised to `activations`.
    EmberdError when the format cannot take the dimensions.
    """
    types = types_suffix(format, activations)
    with kernel(f"shared_expert_{types}_h{hidden}_s{width}_tn") as builder:
        rows = dimension("tokens")
        x = T.arg("x", T.buffer((rows, hidden), "float32"))
        weights = SharedWeights.declare(format, hidden, width)
        scales = T.arg("scales", T.buffer((rows, 1), "float32"))
        y = T.arg("y", T.buffer((rows, hidden), "float32"))
        inputs = declare_input(isa, FORMATS[format], activations, x)
        layer = SharedExpert(isa, x, weights, weights.expert(inputs, rows), scales, y)
        with T.sblock("root"):
            with T.parallel(0, rows) as row:
                inputs.prepare(row)
                layer.compute_scale(row)
            _for_blocks(rows, layer.expert.hidden_tasks, layer.compute_hidden)
            _for_blocks(rows, layer.expert.output_tasks, layer.compute_output)
    return builder.get()


def shared_expert_scratch(
    tokens: int, *, format: str, activations: Precision, hidden: int, width: int
) -> Scratch:
    """Scratch of `shared_expert`."""
    weight_format = FORMATS[format]
    return [
        *input_scratch(weight_format, activations, tokens, hidden),
        *units_scratch(weight_format, activations, tokens, width),
    ]


@dataclass(frozen=True)
class SharedWeights:
    """The inputs of `shared_expert` but x."""

    gate: Buffer
    up: Buffer
    down: Buffer
    expert_gate: Buffer
    width: int

    @staticmethod
    def declare(format: str, hidden: int, width: int) -> SharedWeights:
        return SharedWeights(
            weight_argument("shared_gate", format, width, hidden),
            weight_argument("shared_up", format, width, hidden),
            weight_argument("shared_down", format, hidden, width),
            T.arg("expert_gate", T.buffer((1, hidden), "float32")),
            width,
        )

    def expert(self, inputs: ExpertInput, tokens: Dimension) -> Experts:
        """Declares the scratch arguments."""
        return inputs.shared(self.gate, self.up, self.down, tokens, self.width)


@dataclass(frozen=True)
class SharedExpert:
    """What `shared_expert` computes, in parts for a block of `count` rows from `first` on."""

    isa: Isa
    x: Buffer
    weights: SharedWeights
    expert: Experts
    scales: Buffer  # float32 [T, 1]
    y: Buffer  # float32 [T, H]

    def compute_scale(self, row: Expr) -> None:
        weight = float_row(self.weights.expert_gate, 0)
        ((logit,),) = dot_float_rows(self.isa, [weight], self.x, [row])
        store(self.scales, sigmoid(logit), [row, 0])

    def compute_hidden(self, first: Expr | int, count: Expr | int, part: Expr) -> None:
        def at(row: Expr) -> Expr:
            return first + row

        self.expert.compute_hidden(None, part, at, at, count)

    def compute_output(self, first: Expr | int, count: Expr | int, part: Expr) -> None:
        def put(row: Expr, column: Expr, value: Expr) -> None:
            store(self.y, value, [first + row, column])

        self.expert.compute_output(None, part, lambda row: first + row, count, put)


def _for_blocks(rows: Dimension, parts: int, body: Callable[[Expr, Expr, Expr], None]) -> None:
    """Emits body(first, count, part) for every block of rows and every part, in parallel."""
    runs = T.Bind(T.truncdiv(rows + (ROWS * _TASK_BLOCKS - 1), ROWS * _TASK_BLOCKS))
    with T.parallel(0, parts * runs) as task:
        part = T.Bind(T.truncdiv(task, runs))
        start = T.Bind((task - part * runs) * (ROWS * _TASK_BLOCKS))
        left = T.Bind(T.min(rows - start, ROWS * _TASK_BLOCKS))
        with T.serial(0, T.truncdiv(left + (ROWS - 1), ROWS)) as block:
            first = T.Bind(start + block * ROWS)
            body(first, T.Bind(T.min(rows - first, ROWS)), part)
