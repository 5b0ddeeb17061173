"""The gated delta mixer: the layer kind whose state has a fixed size."""

from __future__ import annotations

import onnx
from emberd.compile.blocks import causal_convolution, gated_delta_rule
from emberd.compile.blocks.graph import DOMAIN, Graph, Shape, floats
from emberd.compile.dimensions import Dimensions, GatedDeltaDimensions


def weight_shapes(dimensions: Dimensions) -> dict[str, tuple[int, ...]]:
    hidden, delta = dimensions.hidden_size, _delta(dimensions)
    return {
        "input_norm": (hidden,),
        "in_proj_qkv": (delta.channels, hidden),
        "in_proj_z": (delta.value_channels, hidden),
        "in_proj_b": (delta.value_heads, hidden),
        "in_proj_a": (delta.value_heads, hidden),
        "conv": (delta.channels, delta.conv_kernel),
        "A_log": (delta.value_heads,),
        "dt_bias": (delta.value_heads,),
        "output_norm": (delta.value_dim,),
        "out_proj": (hidden, delta.value_channels),
    }


def build(dimensions: Dimensions) -> onnx.ModelProto:
    """hidden f32[T, H], conv_state f32[W-1, C], recurrent_state f32[Hv, Dk, Dv] -> hidden_out
    (residual added), conv_state_out, recurrent_state_out. Both states start as zeros.

    Source: `Qwen3_5MoeGatedDeltaNet` of Hugging Face transformers.
    """
    delta = _delta(dimensions)
    graph = Graph()
    x = graph.rms_norm("hidden", "input_norm", dimensions.eps)
    graph.add(
        causal_convolution.NAME,
        graph.linear(x, "in_proj_qkv"),
        "conv",
        "conv_state",
        outputs=["qkv", "conv_state_out"],
        domain=DOMAIN,
        **causal_convolution.attributes(delta),
    )
    z = graph.linear(x, "in_proj_z")
    b = graph.linear(x, "in_proj_b")
    a = graph.linear(x, "in_proj_a")
    graph.add(
        gated_delta_rule.NAME,
        *("qkv", b, a, "A_log", "dt_bias", "recurrent_state"),
        outputs=["mixed", "recurrent_state_out"],
        domain=DOMAIN,
        **gated_delta_rule.attributes(delta),
    )
    gated = _gated_norm(graph, "mixed", z, delta, dimensions.eps)
    graph.add("Add", "hidden", graph.linear(gated, "out_proj"), outputs=["hidden_out"])

    hidden: Shape = ["T", dimensions.hidden_size]
    conv_state = [delta.conv_kernel - 1, delta.channels]
    recurrent_state = [delta.value_heads, delta.key_dim, delta.value_dim]
    return graph.model(
        "gated_delta",
        [
            floats("hidden", hidden),
            floats("conv_state", conv_state),
            floats("recurrent_state", recurrent_state),
        ],
        weight_shapes(dimensions),
        [
            floats("hidden_out", hidden),
            floats("conv_state_out", conv_state),
            floats("recurrent_state_out", recurrent_state),
        ],
        [causal_convolution.function(delta), gated_delta_rule.function(delta)],
    )


def _gated_norm(graph: Graph, x: str, z: str, delta: GatedDeltaDimensions, eps: float) -> str:
    """f32[T, Hv*Dv]: each head normalised, times its weight (not zero-centred), times silu(z)."""
    heads = graph.reshape(x, -1, delta.value_heads, delta.value_dim)
    gate = graph.reshape(z, -1, delta.value_heads, delta.value_dim)
    normalized = graph.add("Mul", graph.normalize(heads, eps), "output_norm")
    gated = graph.add("Mul", normalized, graph.silu(gate))
    return graph.reshape(gated, -1, delta.value_channels)


def _delta(dimensions: Dimensions) -> GatedDeltaDimensions:
    if dimensions.gated_delta is None:
        raise ValueError("these dimensions are of a model without gated delta layers")
    return dimensions.gated_delta
