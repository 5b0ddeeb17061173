"""Local function `emberd.GatedDeltaRule`: linear attention with a decaying, corrected memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from emberd.compile.blocks.graph import Graph, floats
from emberd.compile.dimensions import GatedDeltaDimensions
from onnx import helper

NAME = "GatedDeltaRule"
L2_EPS = 1e-6


def attributes(dimensions: GatedDeltaDimensions) -> dict[str, Any]:
    """What a call carries."""
    return {
        "key_heads": dimensions.key_heads,
        "value_heads": dimensions.value_heads,
        "key_dim": dimensions.key_dim,
        "value_dim": dimensions.value_dim,
    }


def function(dimensions: GatedDeltaDimensions) -> onnx.FunctionProto:
    """One step a token over the state S f32[Hv, Dk, Dv], which maps keys to values.

    (qkv f32[T, C] = [q Hk*Dk | k Hk*Dk | v Hv*Dv], b f32[T, Hv], a f32[T, Hv], A_log f32[Hv],
    dt_bias f32[Hv], state) -> (out f32[T, Hv*Dv], state_out).

    With beta = sigmoid(b), decay = exp(-exp(A_log) softplus(a + dt_bias)), q and k of length 1,
    q / sqrt(Dk), and value head h using key head h // (Hv / Hk):
    S = decay S;  S = S + k (beta (v - S^T k))^T;  out = S^T q.

    Source: Yang et al., "Gated Delta Networks" (arXiv 2412.06464); scaling and layout as
    `torch_recurrent_gated_delta_rule` of Hugging Face transformers.
    """
    key_heads, value_heads = dimensions.key_heads, dimensions.value_heads
    graph = Graph()
    sizes = [dimensions.key_channels, dimensions.key_channels, dimensions.value_channels]
    query, key, value = graph.split("qkv", sizes, ["query", "key", "value"])
    query = _unit_rows(graph, graph.reshape(query, -1, key_heads, dimensions.key_dim))
    query = graph.add("Div", query, graph.constant(float(np.sqrt(dimensions.key_dim))))
    key = _unit_rows(graph, graph.reshape(key, -1, key_heads, dimensions.key_dim))
    sequences = [
        _row_per_value_head(graph, query, dimensions),
        _row_per_value_head(graph, key, dimensions),
        graph.reshape(value, -1, value_heads, 1, dimensions.value_dim),
        graph.reshape(graph.add("Sigmoid", "b"), -1, value_heads, 1, 1),
        graph.reshape(_decay(graph), -1, value_heads, 1, 1),
    ]
    graph.add(
        "Scan",
        "state",
        *sequences,
        outputs=["state_out", "rows"],
        body=_token_step(dimensions),
        num_scan_inputs=len(sequences),
    )
    graph.reshape("rows", -1, dimensions.value_channels, output="out")
    inputs = ["qkv", "b", "a", "A_log", "dt_bias", "state"]
    return graph.function(NAME, inputs, ["out", "state_out"], list(attributes(dimensions)))


def _unit_rows(graph: Graph, x: str) -> str:
    """x scaled to length 1 over the last axis."""
    squares = graph.add("ReduceSum", graph.add("Mul", x, x), graph.constant([-1]), keepdims=1)
    return graph.add("Div", x, graph.add("Sqrt", graph.add("Add", squares, graph.constant(L2_EPS))))


def _row_per_value_head(graph: Graph, x: str, dimensions: GatedDeltaDimensions) -> str:
    """f32[T, Hk, Dk] -> f32[T, Hv, 1, Dk]: each key head repeated for its group of value heads."""
    group = dimensions.value_heads // dimensions.key_heads
    heads = graph.constant([head // group for head in range(dimensions.value_heads)])
    return graph.add("Unsqueeze", graph.add("Gather", x, heads, axis=1), graph.constant([2]))


def _decay(graph: Graph) -> str:
    """f32[T, Hv] in (0, 1): what remains of the state at each token."""
    time_step = graph.add("Softplus", graph.add("Add", "a", "dt_bias"))
    rate = graph.add("Neg", graph.add("Exp", "A_log"))
    return graph.add("Exp", graph.add("Mul", rate, time_step))


def _token_step(dimensions: GatedDeltaDimensions) -> onnx.GraphProto:
    """The recurrence for one token; rows are [Hv, 1, D] so that every product is a MatMul."""
    heads, key_dim, value_dim = dimensions.value_heads, dimensions.key_dim, dimensions.value_dim
    graph = Graph(prefix="step_")
    decayed = graph.add("Mul", "step_state", "step_decay")
    remembered = graph.add("MatMul", "step_key", decayed)
    surprise = graph.add("Sub", "step_value", remembered)
    update = graph.add("Mul", surprise, "step_beta")
    key_column = graph.add("Transpose", "step_key", perm=[0, 2, 1])
    change = graph.add("MatMul", key_column, update)
    graph.add("Add", decayed, change, outputs=["step_state_out"])
    graph.add("MatMul", "step_query", "step_state_out", outputs=["step_row"])
    return helper.make_graph(
        graph.nodes,
        "gated_delta_rule_step",
        [
            floats("step_state", [heads, key_dim, value_dim]),
            floats("step_query", [heads, 1, key_dim]),
            floats("step_key", [heads, 1, key_dim]),
            floats("step_value", [heads, 1, value_dim]),
            floats("step_beta", [heads, 1, 1]),
            floats("step_decay", [heads, 1, 1]),
        ],
        [
            floats("step_state_out", [heads, key_dim, value_dim]),
            floats("step_row", [heads, 1, value_dim]),
        ],
    )
