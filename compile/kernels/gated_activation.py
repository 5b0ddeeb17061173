"""Gated activation: y = act(gate) * up, with SiLU (SwiGLU) or the sigmoid (attention's gate)."""

from __future__ import annotations

from typing import Literal

import numpy as np
from emberd.compile.isa.isa import Isa
from emberd.compile.isa.math import sigmoid, silu
from emberd.compile.isa.vector import PrimFunc, kernel, load, store
from emberd.compile.kernels.dimensions import (
    Scratch,
    block_size,
    dimension,
    parallel_unless_small,
    token_suffix,
    vector_lanes,
)
from numpy.typing import NDArray
from tvm.script import tirx as T  # noqa: N812

Kind = Literal["silu", "sigmoid"]

_ACTIVATIONS = {"silu": silu, "sigmoid": sigmoid}


def reference(
    gate: NDArray[np.float64], up: NDArray[np.float64], *, kind: Kind
) -> NDArray[np.float64]:
    """gate, up [T, N] -> y [T, N]."""
    activation = np.exp(-np.logaddexp(0.0, -gate))  # sigmoid, without overflow
    return (gate * activation if kind == "silu" else activation) * up


def gated_activation(isa: Isa, *, kind: Kind, columns: int, tokens: int | None) -> PrimFunc:
    """gate f32[T, columns], up f32[T, columns] -> y f32[T, columns]."""
    lanes = vector_lanes(isa, columns)
    block = block_size(columns)
    activation = _ACTIVATIONS[kind]
    with kernel(f"gated_activation_{kind}_n{columns}_{token_suffix(tokens)}") as builder:
        rows = dimension("tokens", tokens)
        shape = (rows, columns)
        gate = T.arg("gate", T.buffer(shape, "float32"))
        up = T.arg("up", T.buffer(shape, "float32"))
        y = T.arg("y", T.buffer(shape, "float32"))
        blocks = columns // block
        with T.sblock("root"), parallel_unless_small(rows * blocks, block) as task:
            row = T.Bind(task // blocks)
            first = T.Bind(task % blocks * block)
            with T.serial(0, block // min(block, lanes)) as vector:
                at = [row, first + vector * lanes]
                value = activation(load(gate, at, lanes))
                store(y, value * load(up, at, lanes), at)
    return builder.get()


def gated_activation_scratch(tokens: int, *, kind: Kind, columns: int) -> Scratch:
    """None is needed."""
    return []
