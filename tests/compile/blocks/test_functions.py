"""Each local function, run by onnxruntime, against the numpy reference of its kernel."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import onnxruntime
import pytest
from emberd.compile.blocks import (
    cached_attention,
    causal_convolution,
    gated_delta_rule,
    rotary_embedding,
)
from emberd.compile.blocks.graph import DOMAIN, Graph, Shape, floats, integers
from emberd.compile.dimensions import AttentionDimensions, GatedDeltaDimensions
from emberd.compile.kernels import cached_attention as attention_kernel
from emberd.compile.kernels import causal_convolution as convolution_kernel
from emberd.compile.kernels import gated_delta_rule as delta_kernel
from emberd.compile.kernels import rotary_embedding as rotary_kernel

Arrays = dict[str, np.ndarray]

DELTAS = [
    GatedDeltaDimensions(key_heads, value_heads, key_dim, value_dim, conv_kernel)
    for key_heads, value_heads, key_dim, value_dim, conv_kernel in (
        (1, 1, 4, 4, 2),
        (2, 4, 8, 16, 3),
        (2, 8, 16, 8, 4),
        (3, 3, 6, 10, 7),
    )
]
ATTENTIONS = [
    AttentionDimensions(query_heads, kv_heads, head_dim, rotary_dim, theta)
    for query_heads, kv_heads, head_dim, rotary_dim, theta in (
        (1, 1, 2, 2, 1e4),
        (4, 2, 16, 4, 1e7),
        (8, 1, 8, 8, 1e4),
        (3, 3, 12, 6, 1e6),
    )
]
by_delta = pytest.mark.parametrize("delta", DELTAS, ids=str)
by_attention = pytest.mark.parametrize("attention", ATTENTIONS, ids=str)


def run(function: onnx.FunctionProto, inputs: Arrays, shapes: Sequence[Shape]) -> list[np.ndarray]:
    """Call `function` from a graph of its own, with shapes that are symbolic where T or P is."""
    graph = Graph()
    attributes = dict.fromkeys(function.attribute, 1)
    graph.add(
        function.name,
        *function.input,
        outputs=list(function.output),
        domain=DOMAIN,
        **attributes,
    )
    values = [
        (integers if array.dtype == np.int32 else floats)(
            name, [f"{name}_{axis}" for axis in range(array.ndim)]
        )
        for name, array in inputs.items()
    ]
    outputs = [floats(name, shape) for name, shape in zip(function.output, shapes, strict=True)]
    model = graph.model("call", values, {}, outputs, [function])
    session = onnxruntime.InferenceSession(model.SerializeToString())
    return list(session.run(None, inputs))


def draw(seed: int, **shapes: Sequence[int]) -> Arrays:
    generator = np.random.default_rng(seed)
    return {
        name: generator.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()
    }


def wide(arrays: Arrays) -> list[np.ndarray]:
    """The inputs in the precision of the references."""
    return [
        array.astype(np.float64) if array.dtype == np.float32 else array
        for array in arrays.values()
    ]


@by_delta
@pytest.mark.parametrize("tokens", [1, 2, 9])
def test_causal_convolution(delta: GatedDeltaDimensions, tokens: int) -> None:
    channels, taps = delta.channels, delta.conv_kernel
    inputs = draw(tokens, x=(tokens, channels), weight=(channels, taps), state=(taps - 1, channels))
    shapes: list[Shape] = [["T", channels], [taps - 1, channels]]
    y, state = run(causal_convolution.function(delta), inputs, shapes)
    expected_y, expected_state = convolution_kernel.reference(*wide(inputs))
    np.testing.assert_allclose(y, expected_y, atol=1e-5)
    np.testing.assert_array_equal(state, expected_state.astype(np.float32))


@by_delta
@pytest.mark.parametrize("tokens", [1, 2, 33])
def test_gated_delta_rule(delta: GatedDeltaDimensions, tokens: int) -> None:
    heads = delta.value_heads
    inputs = draw(
        tokens,
        qkv=(tokens, delta.channels),
        b=(tokens, heads),
        a=(tokens, heads),
        A_log=(heads,),
        dt_bias=(heads,),
        state=(heads, delta.key_dim, delta.value_dim),
    )
    shapes: list[Shape] = [["T", delta.value_channels], inputs["state"].shape]
    out, state = run(gated_delta_rule.function(delta), inputs, shapes)
    expected = delta_kernel.reference(*wide(inputs), key_heads=delta.key_heads)
    np.testing.assert_allclose(out, expected[0], atol=2e-5)
    np.testing.assert_allclose(state, expected[1], atol=2e-5)


@by_attention
@pytest.mark.parametrize("first", [0, 5, 100_000])
def test_rotary_embedding(attention: AttentionDimensions, first: int) -> None:
    inputs = draw(first, x=(6, 3, attention.head_dim))
    inputs["positions"] = np.arange(first, first + 6, dtype=np.int32)
    (y,) = run(rotary_embedding.function(attention), inputs, [["T", "heads", attention.head_dim]])
    frequencies = rotary_embedding.inverse_frequencies(attention.rotary_dim, attention.rope_theta)
    x, positions = wide(inputs)
    expected = rotary_kernel.reference(x, positions, frequencies)
    np.testing.assert_allclose(y, expected, atol=1e-5)


@pytest.mark.parametrize("theta", [1e4, 1e6, 1e7])
@pytest.mark.parametrize("rotary_dim", [2, 6, 64])
def test_inverse_frequencies_fall_from_one(rotary_dim: int, theta: float) -> None:
    frequencies = rotary_embedding.inverse_frequencies(rotary_dim, theta)
    exact = [theta ** (-2 * pair / rotary_dim) for pair in range(rotary_dim // 2)]
    assert frequencies.dtype == np.float32 and frequencies[0] == 1.0
    np.testing.assert_allclose(frequencies, exact, rtol=1e-6)


@by_attention
@pytest.mark.parametrize(("past", "tokens"), [(0, 1), (0, 7), (5, 1), (5, 7)])
def test_cached_attention(attention: AttentionDimensions, past: int, tokens: int) -> None:
    heads, size = attention.kv_heads, attention.head_dim
    inputs = draw(
        past + tokens,
        query=(tokens, attention.query_heads, size),
        key=(tokens, heads, size),
        value=(tokens, heads, size),
        positions=(tokens,),
        key_cache=(past, heads, size),
        value_cache=(past, heads, size),
    )
    inputs["positions"] = np.arange(past, past + tokens, dtype=np.int32)
    cache: Shape = ["rows", heads, size]
    shapes: list[Shape] = [["T", attention.query_channels], cache, cache]
    out, keys, values = run(cached_attention.function(attention), inputs, shapes)
    room = np.zeros((tokens, heads, size))  # the kernel's caches have a capacity
    *new, key_cache, value_cache = wide(inputs)
    caches = [np.concatenate([rows, room]) for rows in (key_cache, value_cache)]
    expected = attention_kernel.reference(*new, *caches)
    np.testing.assert_allclose(out, expected[0], atol=1e-5)
    np.testing.assert_array_equal(keys, expected[1].astype(np.float32))
    np.testing.assert_array_equal(values, expected[2].astype(np.float32))
