"""import_onnx: blocks become functions of a fixed number of tokens that compute the same."""

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
from emberd.compile.kernels.integer_cache import row_elements
from emberd.compile.passes import operators
from emberd.compile.passes.import_onnx import import_onnx
from emberd.daemon.errors import EmberdError
from onnx import TensorProto, helper
from relax_functions import Array, calls, random, run

DIMENSIONS = Dimensions(
    hidden_size=32,
    vocab_size=24,
    layers=2,
    eps=1e-6,
    max_context=128,
    moe=MoeDimensions(experts=4, top_k=2, intermediate_size=32, shared_intermediate_size=32),
    attention=AttentionDimensions(
        query_heads=4, kv_heads=2, head_dim=16, rotary_dim=8, rope_theta=1e4
    ),
    gated_delta=GatedDeltaDimensions(
        key_heads=2, value_heads=4, key_dim=16, value_dim=8, conv_kernel=4
    ),
)
TOKENS = 3


@pytest.mark.parametrize("block", BLOCKS)
def test_parameters_are_the_inputs_of_the_graph_for_a_number_of_tokens(block: str) -> None:
    model = BLOCKS[block].build(DIMENSIONS)
    parameters = import_onnx(model, TOKENS, "float32")["main"].params
    assert [parameter.name for parameter in parameters] == [
        value.name for value in model.graph.input
    ]
    shapes = {parameter.name: parameter.ty.shape for parameter in parameters}
    leading = "tokens" if block == "embed" else "hidden"
    assert int(shapes[leading][0]) == TOKENS


@pytest.mark.parametrize("block", ["embed", "head"])
def test_a_block_computes_what_onnxruntime_computes(block: str) -> None:
    model = BLOCKS[block].build(DIMENSIONS)
    module = import_onnx(model, TOKENS, "float32")
    arguments: list[Array] = []
    for parameter in module["main"].params:
        shape = [int(size) for size in parameter.ty.shape]
        if parameter.name == "tokens":
            arguments.append(np.array([23, 0, 7], np.int32))
        else:
            arguments.append(random(*shape))
    names = [parameter.name for parameter in module["main"].params]
    session = onnxruntime.InferenceSession(model.SerializeToString())
    expected = session.run(None, dict(zip(names, arguments, strict=True)))[0]
    np.testing.assert_allclose(run(module, *arguments), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ("gated_delta", {"causal_convolution": [], "gated_delta_rule": [2, 4, 16, 8]}),
        ("gated_attention", {"rotary_embedding": [8], "cached_attention": []}),
    ],
)
def test_local_functions_become_operators(
    block: str, expected: dict[str, list[operators.Scalar]]
) -> None:
    main = import_onnx(BLOCKS[block].build(DIMENSIONS), TOKENS, "float32")["main"]
    bindings = [binding for part in main.body.blocks for binding in part.bindings]
    parsed = [operators.parse(binding.value) for binding in bindings]
    assert {call.name: call.scalars for call in parsed if call is not None} == expected


@pytest.mark.parametrize(("dtype", "bits"), [("float32", None), ("int16", 16), ("int8", 8)])
def test_the_cache_has_the_dtype_asked_for(dtype: str, bits: int | None) -> None:
    main = import_onnx(BLOCKS["gated_attention"].build(DIMENSIONS), TOKENS, dtype)["main"]
    types = {parameter.name: parameter.ty for parameter in main.params}
    heads, size = DIMENSIONS.attention.kv_heads, DIMENSIONS.attention.head_dim
    row = size if bits is None else row_elements(size, bits)
    for name in ("key_cache", "value_cache"):
        assert str(types[name].dtype) == dtype
        assert [int(types[name].shape[i]) for i in (1, 2)] == [heads, row]
    assert str(types["hidden"].dtype) == "float32"


def _model(operator: str) -> onnx.ModelProto:
    value = helper.make_tensor_value_info("hidden", TensorProto.FLOAT, ["T", 4])
    output = helper.make_tensor_value_info("hidden_out", TensorProto.FLOAT, ["T", 4])
    node = helper.make_node(operator, ["hidden"], ["hidden_out"])
    graph = helper.make_graph([node], "strange", [value], [output])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)])


def test_an_operator_without_a_conversion_is_named() -> None:
    assert calls(import_onnx(_model("Tanh"), TOKENS, "float32")) == ["relax.tanh"]
    with pytest.raises(EmberdError, match=r"block strange.*StringNormalizer"):
        import_onnx(_model("StringNormalizer"), TOKENS, "float32")
