"""Local function `emberd.CausalConvolution`: depthwise causal convolution with a carried state."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from emberd.compile.blocks.graph import Graph
from emberd.compile.dimensions import GatedDeltaDimensions

NAME = "CausalConvolution"


def attributes(dimensions: GatedDeltaDimensions) -> dict[str, Any]:
    """What a call carries."""
    return {"kernel_size": dimensions.conv_kernel}


def function(dimensions: GatedDeltaDimensions) -> onnx.FunctionProto:
    """(x f32[T, C], weight f32[C, W], state f32[W-1, C]) -> (y f32[T, C], state_out f32[W-1, C]).

    y is SiLU of the convolution of each channel over the rows [state; x]; `state_out` is the last
    W-1 of those rows.

    Source: `causal_conv1d_fn` of Hugging Face transformers.
    """
    graph = Graph()
    first = graph.constant([0])
    rows = graph.add("Concat", "state", "x", axis=0)  # [W-1+T, C]
    signal = graph.add("Unsqueeze", graph.add("Transpose", rows, perm=[1, 0]), first)
    kernel = graph.add("Unsqueeze", "weight", graph.constant([1]))  # [C, 1, W]
    convolved = graph.add("Conv", signal, kernel, group=dimensions.channels)  # [1, C, T]
    tokens = graph.add("Transpose", graph.add("Squeeze", convolved, first), perm=[1, 0])
    graph.add("Mul", tokens, graph.add("Sigmoid", tokens), outputs=["y"])
    start = graph.constant([1 - dimensions.conv_kernel])
    end = graph.constant([int(np.iinfo(np.int64).max)])
    graph.add("Slice", rows, start, end, first, outputs=["state_out"])
    return graph.function(
        NAME, ["x", "weight", "state"], ["y", "state_out"], list(attributes(dimensions))
    )
