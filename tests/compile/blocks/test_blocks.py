"""The contract of the block graphs: names, shapes, operators that passes match, functions."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from emberd.compile.blocks import BLOCKS
from emberd.compile.dimensions import (
    AttentionDimensions,
    Dimensions,
    GatedDeltaDimensions,
    MoeDimensions,
)

DIMENSIONS = Dimensions(
    hidden_size=32,
    vocab_size=50,
    layers=2,
    eps=1e-6,
    max_context=64,
    moe=MoeDimensions(experts=5, top_k=3, intermediate_size=12, shared_intermediate_size=20),
    attention=AttentionDimensions(4, 2, 8, 4, 1e6),
    gated_delta=GatedDeltaDimensions(2, 4, 6, 10, 3),
)
STATES: dict[str, dict[str, list[int | str]]] = {
    "gated_delta": {"conv_state": [2, 64], "recurrent_state": [4, 6, 10]},
    "gated_attention": {"key_cache": ["P", 2, 8], "value_cache": ["P", 2, 8]},
}
FUNCTIONS = {
    "gated_delta": {"CausalConvolution", "GatedDeltaRule"},
    "gated_attention": {"RotaryEmbedding", "CachedAttention"},
}
by_block = pytest.mark.parametrize("block", BLOCKS)


def shape(value: onnx.ValueInfoProto) -> list[int | str]:
    return [size.dim_param or size.dim_value for size in value.type.tensor_type.shape.dim]


@by_block
def test_inputs_and_outputs(block: str) -> None:
    """Data, then weights in canonical order; a state `x` comes out as `x_out`."""
    model = BLOCKS[block].build(DIMENSIONS)
    weights = BLOCKS[block].weight_shapes(DIMENSIONS)
    inputs = {value.name: shape(value) for value in model.graph.input}
    outputs = {value.name: shape(value) for value in model.graph.output}
    assert list(inputs)[-len(weights) :] == list(weights)
    assert all(inputs[name] == list(size) for name, size in weights.items())
    data = list(inputs)[: -len(weights)]
    states = STATES.get(block, {})
    if block == "embed":
        assert data == ["tokens"] and outputs == {"hidden": ["T", 32]}
    elif block == "head":
        assert data == ["hidden"] and outputs == {"logits": ["T", 50]}
    else:
        positions = ["positions"] if block == "gated_attention" else []
        assert data == ["hidden", *positions, *states]
        assert inputs["hidden"] == outputs["hidden_out"] == ["T", 32]
        assert list(outputs) == ["hidden_out", *(f"{name}_out" for name in states)]
        assert all(inputs[name] == size for name, size in states.items())


@by_block
def test_graphs_are_portable(block: str) -> None:
    model = BLOCKS[block].build(DIMENSIONS)
    onnx.checker.check_model(model, full_check=True)
    versions = {opset.domain: opset.version for opset in model.opset_import}
    assert versions == {"": 21, "emberd": 1} and model.ir_version == 10
    assert not model.graph.initializer
    assert {function.name for function in model.functions} == FUNCTIONS.get(block, set())
    called = {node.op_type for node in model.graph.node if node.domain == "emberd"}
    assert called == FUNCTIONS.get(block, set())
    for function in model.functions:
        assert all(node.domain == "" for node in function.node)


def test_calls_carry_their_dimensions() -> None:
    found = {
        node.op_type: {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        for block in FUNCTIONS
        for node in BLOCKS[block].build(DIMENSIONS).graph.node
        if node.domain == "emberd"
    }
    assert found == {
        "CausalConvolution": {"kernel_size": 3},
        "GatedDeltaRule": {"key_heads": 2, "value_heads": 4, "key_dim": 6, "value_dim": 10},
        "RotaryEmbedding": {"rotary_dim": 4, "theta": 1e6},
        "CachedAttention": {},
    }


def test_building_is_deterministic() -> None:
    for kind in BLOCKS.values():
        first, second = kind.build(DIMENSIONS), kind.build(DIMENSIONS)
        assert first.SerializeToString() == second.SerializeToString()


def test_moe_block_is_the_sum_of_its_experts() -> None:
    """Expert by expert in float64, the way a reader would write it down."""
    generator = np.random.default_rng(8)
    sizes = BLOCKS["moe"].weight_shapes(DIMENSIONS)
    weights = {
        name: generator.standard_normal(size).astype(np.float32) / 3 for name, size in sizes.items()
    }
    hidden = generator.standard_normal((6, 32)).astype(np.float32)
    session = onnxruntime.InferenceSession(BLOCKS["moe"].build(DIMENSIONS).SerializeToString())
    (out,) = session.run(None, {"hidden": hidden, **weights})

    w = {name: weight.astype(np.float64) for name, weight in weights.items()}
    for token, row in enumerate(hidden.astype(np.float64)):
        x = row / np.sqrt(np.mean(row**2) + 1e-6) * (1 + w["post_norm"])
        probabilities = np.exp(w["router"] @ x)
        chosen = np.argsort(-probabilities)[:3]
        expected = row.copy()
        for expert in chosen:
            gate, up = np.split(w["experts_gate_up"][expert] @ x, 2)
            share = probabilities[expert] / probabilities[chosen].sum()
            expected += share * (w["experts_down"][expert] @ (silu(gate) * up))
        gate, up = w["shared_gate_proj"] @ x, w["shared_up_proj"] @ x
        opening = 1 / (1 + np.exp(-w["shared_expert_gate"] @ x))
        expected += opening * (w["shared_down_proj"] @ (silu(gate) * up))
        np.testing.assert_allclose(out[token], expected, atol=1e-4)


def silu(x: np.ndarray) -> np.ndarray:
    result: np.ndarray = x / (1 + np.exp(-x))
    return result


@pytest.mark.parametrize("missing", ["attention", "gated_delta"])
def test_mixers_need_their_dimensions(missing: str) -> None:
    values = {**vars(DIMENSIONS), missing: None}
    block = "gated_attention" if missing == "attention" else missing
    with pytest.raises(ValueError, match="a model without"):
        BLOCKS[block].build(Dimensions(**values))
