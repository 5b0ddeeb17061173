"""The gated attention mixer: the layer kind whose state grows with the context."""

from __future__ import annotations

import onnx
from emberd.compile.blocks import cached_attention, rotary_embedding
from emberd.compile.blocks.graph import DOMAIN, Graph, Shape, floats, integers
from emberd.compile.dimensions import AttentionDimensions, Dimensions


def weight_shapes(dimensions: Dimensions) -> dict[str, tuple[int, ...]]:
    hidden, attention = dimensions.hidden_size, _attention(dimensions)
    return {
        "input_norm": (hidden,),
        "q_proj": (2 * attention.query_channels, hidden),
        "k_proj": (attention.kv_channels, hidden),
        "v_proj": (attention.kv_channels, hidden),
        "q_norm": (attention.head_dim,),
        "k_norm": (attention.head_dim,),
        "o_proj": (hidden, attention.query_channels),
    }


def build(dimensions: Dimensions) -> onnx.ModelProto:
    """hidden f32[T, H], positions i32[T], key_cache and value_cache f32[P, Hkv, D] -> hidden_out
    (residual added), key_cache_out and value_cache_out f32[P+T, Hkv, D].

    `q_proj` gives [query | gate] per head; the attention output is scaled by sigmoid(gate).

    Source: `Qwen3_5MoeAttention` of Hugging Face transformers.
    """
    attention = _attention(dimensions)
    kv_heads, head_dim = attention.kv_heads, attention.head_dim
    graph = Graph()
    x = graph.rms_norm("hidden", "input_norm", dimensions.eps)
    query_gate = graph.reshape(graph.linear(x, "q_proj"), -1, attention.query_heads, 2 * head_dim)
    query, gate = graph.split(query_gate, [head_dim, head_dim], ["query", "gate"])
    key = graph.reshape(graph.linear(x, "k_proj"), -1, kv_heads, head_dim)
    value = graph.reshape(graph.linear(x, "v_proj"), -1, kv_heads, head_dim)
    rotary = rotary_embedding.attributes(attention)
    query, key = (
        graph.add(
            rotary_embedding.NAME,
            graph.rms_norm(heads, norm, dimensions.eps),
            "positions",
            domain=DOMAIN,
            **rotary,
        )
        for heads, norm in ((query, "q_norm"), (key, "k_norm"))
    )
    attended = graph.add(
        cached_attention.NAME,
        *(query, key, value, "positions", "key_cache", "value_cache"),
        outputs=["attended", "key_cache_out", "value_cache_out"],
        domain=DOMAIN,
    )
    flat_gate = graph.reshape(gate, -1, attention.query_channels)
    gated = graph.add("Mul", attended, graph.add("Sigmoid", flat_gate))
    graph.add("Add", "hidden", graph.linear(gated, "o_proj"), outputs=["hidden_out"])

    hidden: Shape = ["T", dimensions.hidden_size]
    cached: Shape = ["P", kv_heads, head_dim]
    grown: Shape = ["P_out", kv_heads, head_dim]
    return graph.model(
        "gated_attention",
        [
            floats("hidden", hidden),
            integers("positions", ["T"]),
            floats("key_cache", cached),
            floats("value_cache", cached),
        ],
        weight_shapes(dimensions),
        [
            floats("hidden_out", hidden),
            floats("key_cache_out", grown),
            floats("value_cache_out", grown),
        ],
        [rotary_embedding.function(attention), cached_attention.function(attention)],
    )


def _attention(dimensions: Dimensions) -> AttentionDimensions:
    if dimensions.attention is None:
        raise ValueError("these dimensions are of a model without attention layers")
    return dimensions.attention
