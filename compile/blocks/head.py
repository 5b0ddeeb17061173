"""Final norm and language model head."""

from __future__ import annotations

import onnx
from emberd.compile.blocks.graph import Graph, floats
from emberd.compile.dimensions import Dimensions


def weight_shapes(dimensions: Dimensions) -> dict[str, tuple[int, ...]]:
    return {
        "final_norm": (dimensions.hidden_size,),
        "lm_head": (dimensions.vocab_size, dimensions.hidden_size),
    }


def build(dimensions: Dimensions) -> onnx.ModelProto:
    """hidden f32[T, H] -> logits f32[T, V]."""
    graph = Graph()
    normalized = graph.rms_norm("hidden", "final_norm", dimensions.eps)
    graph.linear(normalized, "lm_head", output="logits")
    return graph.model(
        "head",
        [floats("hidden", ["T", dimensions.hidden_size])],
        weight_shapes(dimensions),
        [floats("logits", ["T", dimensions.vocab_size])],
    )
