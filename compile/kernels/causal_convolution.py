"""Depthwise causal convolution over the tokens, followed by SiLU, with the last inputs as state."""

from __future__ import annotations

import numpy as np
from emberd.compile.isa.isa import Isa
from emberd.compile.isa.math import Register, silu
from emberd.compile.isa.vector import Expr, PrimFunc, kernel, load, multiply_add, store
from emberd.compile.kernels.dimensions import Scratch, dimension, token_suffix, vector_lanes
from numpy.typing import NDArray
from tvm.script import tirx as T  # noqa: N812
from tvm.tirx import Shuffle


def reference(
    x: NDArray[np.float64], weight: NDArray[np.float64], state: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """x [T, C], weight [C, W], state [W - 1, C] -> y [T, C], new state [W - 1, C].

    The state holds the W - 1 inputs before x, oldest first; the last tap is for the newest input.
    """
    tokens, taps = len(x), weight.shape[1]
    inputs = np.concatenate([state, x])
    total = sum(inputs[tap : tap + tokens] * weight[:, tap] for tap in range(taps))
    y = np.asarray(total)
    return y / (1.0 + np.exp(-y)), inputs[tokens:]


def causal_convolution(
    isa: Isa, *, channels: int, kernel_size: int, tokens: int | None
) -> PrimFunc:
    """x f32[T, C], weight f32[C, W]; state f32[W - 1, C] in place -> y f32[T, C]."""
    lanes = vector_lanes(isa, channels)
    name = f"causal_convolution_c{channels}_w{kernel_size}_{token_suffix(tokens)}"
    with kernel(name) as builder:
        shape = (dimension("tokens", tokens), channels)
        x = T.arg("x", T.buffer(shape, "float32"))
        weight = T.arg("weight", T.buffer((channels, kernel_size), "float32"))
        state = T.arg("state", T.buffer((kernel_size - 1, channels), "float32"))
        y = T.arg("y", T.buffer(shape, "float32"))
        with T.sblock("root"), T.parallel(0, channels // lanes) as task:
            first = T.Bind(task * lanes)
            taps = _taps(weight, first, channels, kernel_size, lanes)
            history = [Register(load(state, [age, first], lanes)) for age in range(kernel_size - 1)]
            with T.serial(0, shape[0]) as token:
                inputs = [past.value for past in history]
                inputs.append(load(x, [token, first], lanes))
                total = T.Bind(inputs[0] * taps[0])
                for tap, value in zip(taps[1:], inputs[1:], strict=True):
                    total = multiply_add(value, tap, total)
                store(y, silu(total), [token, first])
                for past, newer in zip(history, inputs[1:], strict=True):
                    past.set(newer)
            for age, past in enumerate(history):
                store(state, past.value, [age, first])
    return builder.get()


def causal_convolution_scratch(tokens: int, *, channels: int, kernel_size: int) -> Scratch:
    """None is needed."""
    return []


def _taps(weight: Expr, first: Expr, channels: int, kernel_size: int, lanes: int) -> list[Expr]:
    """For each tap its weights for `lanes` channels from `first` on: a transposed block."""
    flat = T.decl_buffer((channels * kernel_size,), "float32", data=weight.data)
    rows = [load(flat, [first * kernel_size + i * lanes], lanes) for i in range(kernel_size)]
    if lanes == 1:
        return rows
    return [
        T.Bind(Shuffle(rows, [channel * kernel_size + tap for channel in range(lanes)]))
        for tap in range(kernel_size)
    ]
