"""Mixture of experts: router, top-k experts, shared expert.

The gather of whole expert matrices per token states the meaning; `moa_fusion` compiles it away.
"""

from __future__ import annotations

import onnx
from emberd.compile.blocks.graph import Graph, Shape, floats
from emberd.compile.dimensions import Dimensions


def weight_shapes(dimensions: Dimensions) -> dict[str, tuple[int, ...]]:
    hidden, moe = dimensions.hidden_size, dimensions.moe
    return {
        "post_norm": (hidden,),
        "router": (moe.experts, hidden),
        "experts_gate_up": (moe.experts, 2 * moe.intermediate_size, hidden),
        "experts_down": (moe.experts, hidden, moe.intermediate_size),
        "shared_gate_proj": (moe.shared_intermediate_size, hidden),
        "shared_up_proj": (moe.shared_intermediate_size, hidden),
        "shared_down_proj": (hidden, moe.shared_intermediate_size),
        "shared_expert_gate": (1, hidden),
    }


def build(dimensions: Dimensions) -> onnx.ModelProto:
    """hidden f32[T, H] -> hidden_out f32[T, H], with the norm before and the residual added.

    Source: `Qwen3_5MoeSparseMoeBlock` of Hugging Face transformers.
    """
    graph = Graph()
    x = graph.rms_norm("hidden", "post_norm", dimensions.eps)
    ids, weights = _route(graph, x, dimensions.moe.top_k)
    routed = _routed_experts(graph, x, ids, weights, dimensions.moe.intermediate_size)
    output = graph.add("Add", routed, _shared_expert(graph, x))
    graph.add("Add", "hidden", output, outputs=["hidden_out"])
    shape: Shape = ["T", dimensions.hidden_size]
    return graph.model(
        "moe",
        [floats("hidden", shape)],
        weight_shapes(dimensions),
        [floats("hidden_out", shape)],
    )


def _route(graph: Graph, x: str, top_k: int) -> tuple[str, str]:
    """Expert ids i64[T, K] and their weights f32[T, K], which sum to 1."""
    probabilities = graph.add("Softmax", graph.linear(x, "router"), axis=-1)
    k = graph.constant([top_k])
    names = ["top_probabilities", "expert_ids"]
    graph.add("TopK", probabilities, k, outputs=names, axis=-1, largest=1, sorted=1)
    total = graph.add("ReduceSum", "top_probabilities", graph.constant([-1]), keepdims=1)
    return "expert_ids", graph.add("Div", "top_probabilities", total)


def _routed_experts(graph: Graph, x: str, ids: str, weights: str, intermediate_size: int) -> str:
    """f32[T, H]: the weighted sum of each token's experts."""
    gate_up_weight = graph.add("Gather", "experts_gate_up", ids, axis=0)  # [T, K, 2I, H]
    down_weight = graph.add("Gather", "experts_down", ids, axis=0)  # [T, K, H, I]
    row = graph.add("Unsqueeze", x, graph.constant([1, 2]))  # [T, 1, 1, H]
    transposed = graph.add("Transpose", gate_up_weight, perm=[0, 1, 3, 2])
    gate_up = graph.add("MatMul", row, transposed)  # [T, K, 1, 2I]
    gate, up = graph.split(gate_up, [intermediate_size] * 2, ["expert_gate", "expert_up"])
    activated = graph.add("Mul", graph.silu(gate), up)
    transposed = graph.add("Transpose", down_weight, perm=[0, 1, 3, 2])
    down = graph.add("MatMul", activated, transposed)  # [T, K, 1, H]
    down = graph.add("Squeeze", down, graph.constant([2]))
    column = graph.add("Unsqueeze", weights, graph.constant([2]))  # [T, K, 1]
    weighted = graph.add("Mul", down, column)
    return graph.add("ReduceSum", weighted, graph.constant([1]), keepdims=0)


def _shared_expert(graph: Graph, x: str) -> str:
    """f32[T, H]: the expert that every token passes, scaled by its own sigmoid gate."""
    gate = graph.linear(x, "shared_gate_proj")
    up = graph.linear(x, "shared_up_proj")
    down = graph.linear(graph.add("Mul", graph.silu(gate), up), "shared_down_proj")
    scale = graph.add("Sigmoid", graph.linear(x, "shared_expert_gate"))
    return graph.add("Mul", down, scale)
