"""Local function `emberd.CachedAttention`: causal attention over cached and new tokens."""

from __future__ import annotations

import numpy as np
import onnx
from emberd.compile.blocks.graph import Graph
from emberd.compile.dimensions import AttentionDimensions
from onnx import TensorProto

NAME = "CachedAttention"


def function(dimensions: AttentionDimensions) -> onnx.FunctionProto:
    """softmax(q k^T / sqrt(D)) v over P cached and T new tokens.

    (query f32[T, Hq, D], key f32[T, Hkv, D], value f32[T, Hkv, D], positions i32[T],
    key_cache f32[P, Hkv, D], value_cache f32[P, Hkv, D]) -> (out f32[T, Hq*D],
    key_cache_out f32[P+T, Hkv, D], value_cache_out). Cache row j is visible to token t iff
    j <= positions[t].
    """
    query_heads, head_dim = dimensions.query_heads, dimensions.head_dim
    graph = Graph()
    graph.add("Concat", "key_cache", "key", outputs=["key_cache_out"], axis=0)
    graph.add("Concat", "value_cache", "value", outputs=["value_cache_out"], axis=0)
    group = query_heads // dimensions.kv_heads
    heads = graph.constant([head // group for head in range(query_heads)])
    keys = graph.add("Gather", "key_cache_out", heads, axis=1)  # [P+T, Hq, D]
    values = graph.add("Gather", "value_cache_out", heads, axis=1)
    query = graph.add("Transpose", "query", perm=[1, 0, 2])  # [Hq, T, D]
    keys = graph.add("Transpose", keys, perm=[1, 2, 0])  # [Hq, D, P+T]
    values = graph.add("Transpose", values, perm=[1, 0, 2])  # [Hq, P+T, D]
    scores = graph.add("MatMul", query, keys)
    scores = graph.add("Div", scores, graph.constant(float(np.sqrt(head_dim))))
    masked = graph.add("Where", _visible(graph), scores, graph.constant(float("-inf")))
    attended = graph.add("MatMul", graph.add("Softmax", masked, axis=-1), values)
    tokens = graph.add("Transpose", attended, perm=[1, 0, 2])
    graph.reshape(tokens, -1, dimensions.query_channels, output="out")
    return graph.function(
        NAME,
        ["query", "key", "value", "positions", "key_cache", "value_cache"],
        ["out", "key_cache_out", "value_cache_out"],
        [],
    )


def _visible(graph: Graph) -> str:
    """bool[T, P+T]: which cache rows each token may attend to."""
    zero, one = (graph.constant(np.array(value, np.int64)) for value in (0, 1))
    length = graph.add("Gather", graph.add("Shape", "key_cache_out"), zero, axis=0)
    rows = graph.add("Range", zero, length, one)
    positions = graph.add("Cast", "positions", to=TensorProto.INT64)
    last = graph.add("Unsqueeze", positions, graph.constant([1]))
    return graph.add("LessOrEqual", rows, last)
