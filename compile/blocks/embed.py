"""Token embedding."""

from __future__ import annotations

import onnx
from emberd.compile.blocks.graph import Graph, floats, integers
from emberd.compile.dimensions import Dimensions


def weight_shapes(dimensions: Dimensions) -> dict[str, tuple[int, ...]]:
    return {"embedding": (dimensions.vocab_size, dimensions.hidden_size)}


def build(dimensions: Dimensions) -> onnx.ModelProto:
    """tokens i32[T] -> hidden f32[T, H]."""
    graph = Graph()
    graph.add("Gather", "embedding", "tokens", outputs=["hidden"], axis=0)
    return graph.model(
        "embed",
        [integers("tokens", ["T"])],
        weight_shapes(dimensions),
        [floats("hidden", ["T", dimensions.hidden_size])],
    )
