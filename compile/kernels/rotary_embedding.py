"""Rotary position embedding (Su et al., 2021) on the first dimensions of each head.

The rotated pairs are (x[i], x[i + rotary_dim / 2]), as in transformers' `rotate_half`.
"""

from __future__ import annotations

import numpy as np
from emberd.compile.isa.isa import Isa
from emberd.compile.isa.math import computed, cos, negate, sin
from emberd.compile.isa.vector import PrimFunc, broadcast, kernel, load, multiply_add, store
from emberd.compile.kernels.dimensions import Scratch, dimension, token_suffix, vector_lanes
from numpy.typing import NDArray
from tvm.script import tirx as T  # noqa: N812


def reference(
    x: NDArray[np.float64], positions: NDArray[np.int32], inverse_frequency: NDArray[np.float32]
) -> NDArray[np.float64]:
    """x [T, heads, D], positions [T], inverse_frequency f32[rotary_dim / 2] -> y [T, heads, D].

    The angle is a product in f32, as the model was trained with.
    """
    half = len(inverse_frequency)
    angle = (positions[:, None].astype(np.float32) * inverse_frequency).astype(np.float64)
    cosine, sine = np.cos(angle)[:, None], np.sin(angle)[:, None]
    a, b = x[..., :half], x[..., half : 2 * half]
    return np.concatenate(
        [a * cosine - b * sine, b * cosine + a * sine, x[..., 2 * half :]], axis=-1
    )


def rotary_embedding(
    isa: Isa, *, heads: int, head_dim: int, rotary_dim: int, tokens: int | None
) -> PrimFunc:
    """x f32[T, heads, head_dim], positions i32[T], inverse_frequency f32[rotary_dim / 2] -> y."""
    half, rest = rotary_dim // 2, head_dim - rotary_dim
    # The second half of a head begins at `half`, the part that is copied at `rotary_dim`.
    lanes = vector_lanes(isa, half, head_dim)
    name = f"rotary_embedding_h{heads}_d{head_dim}_r{rotary_dim}_{token_suffix(tokens)}"
    with kernel(name) as builder:
        rows = dimension("tokens", tokens)
        shape = (rows, heads, head_dim)
        x = T.arg("x", T.buffer(shape, "float32"))
        positions = T.arg("positions", T.buffer((rows,), "int32"))
        inverse_frequency = T.arg("inverse_frequency", T.buffer((half,), "float32"))
        y = T.arg("y", T.buffer(shape, "float32"))
        with T.sblock("root"), T.parallel(0, rows) as token:
            position = broadcast(T.Cast("float32", positions[token]), lanes)
            with T.serial(0, half // lanes) as vector:
                first = T.Bind(vector * lanes)
                angle = T.Bind(position * load(inverse_frequency, [first], lanes))
                cosine, sine = cos(angle), sin(angle)
                with T.serial(0, heads) as head:
                    a = load(x, [token, head, first], lanes)
                    b = load(x, [token, head, first + half], lanes)
                    rotated = multiply_add(negate(b), sine, T.Bind(a * cosine))
                    store(y, rotated, [token, head, first])
                    rotated = multiply_add(a, sine, T.Bind(b * cosine))
                    store(y, rotated, [token, head, first + half])
            with T.serial(0, heads) as head, T.serial(0, rest // lanes) as vector:
                at = [token, head, rotary_dim + vector * lanes]
                store(y, computed(load(x, at, lanes)), at)
    return builder.get()


def rotary_embedding_scratch(tokens: int, *, heads: int, head_dim: int, rotary_dim: int) -> Scratch:
    """None is needed."""
    return []
