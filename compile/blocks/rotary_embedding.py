"""Local function `emberd.RotaryEmbedding`: positions as rotations of the first dimensions."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from emberd.compile.blocks.graph import Graph
from emberd.compile.dimensions import AttentionDimensions
from onnx import TensorProto

NAME = "RotaryEmbedding"


def inverse_frequencies(rotary_dim: int, theta: float) -> np.ndarray:
    """f32[rotary_dim / 2] in radians a position, rounded where torch rounds it in float32."""
    exponent = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim)
    power = np.power(np.float64(theta), exponent.astype(np.float64)).astype(np.float32)
    return np.float32(1.0) / power


def attributes(dimensions: AttentionDimensions) -> dict[str, Any]:
    """What a call carries."""
    return {"rotary_dim": dimensions.rotary_dim, "theta": dimensions.rope_theta}


def function(dimensions: AttentionDimensions) -> onnx.FunctionProto:
    """(x f32[T, heads, D], positions i32[T]) -> y f32[T, heads, D].

    Dimension i is paired with i + rotary_dim/2; those from rotary_dim on pass unchanged.

    Source: Su et al., "RoFormer" (arXiv 2104.09864), in the layout of `apply_rotary_pos_emb` of
    Hugging Face transformers.
    """
    rotary_dim, passing = dimensions.rotary_dim, dimensions.head_dim - dimensions.rotary_dim
    graph = Graph()
    positions = graph.add("Cast", "positions", to=TensorProto.FLOAT)
    column = graph.add("Unsqueeze", positions, graph.constant([1, 2]))  # [T, 1, 1]
    frequencies = graph.constant(inverse_frequencies(rotary_dim, dimensions.rope_theta))
    angle = graph.add("Mul", column, frequencies)
    angle = graph.add("Concat", angle, angle, axis=-1)  # [T, 1, rotary_dim]
    rotary = "x"
    if passing:
        rotary, rest = graph.split("x", [rotary_dim, passing], ["rotary", "rest"])
    first, second = graph.split(rotary, [rotary_dim // 2] * 2, ["first_half", "second_half"])
    turned = graph.add("Concat", graph.add("Neg", second), first, axis=-1)
    along = graph.add("Mul", rotary, graph.add("Cos", angle))
    across = graph.add("Mul", turned, graph.add("Sin", angle))
    if passing:
        graph.add("Concat", graph.add("Add", along, across), rest, outputs=["y"], axis=-1)
    else:
        graph.add("Add", along, across, outputs=["y"])
    return graph.function(NAME, ["x", "positions"], ["y"], list(attributes(dimensions)))
