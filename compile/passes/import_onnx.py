"""Phase 1: an ONNX block becomes a Relax module for a fixed number of tokens.

Standard operators go through TVM's own ONNX front end. The blocks' local functions (domain
`emberd`: operators that carry state) become calls of our operators, with their state updated in
place, instead of being expanded to their reference bodies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx
import tvm
from emberd.compile.blocks.rotary_embedding import inverse_frequencies
from emberd.compile.kernels.integer_cache import row_elements
from emberd.compile.passes import operators
from emberd.daemon.errors import EmberdError
from tvm import relax
from tvm.relax.frontend.onnx.onnx_frontend import ONNXGraphImporter

# Inputs whose first dimension is the number of tokens.
_TOKEN_INPUTS = ("tokens", "positions", "hidden")
_CACHES = ("key_cache", "value_cache")


def import_onnx(model: onnx.ModelProto, tokens: int, cache_dtype: str) -> tvm.IRModule:
    """Import block `model` with its token dimension set to `tokens`, its KV cache of `cache_dtype`.

    A cache of integers has the shape that integer_cache gives it. The result has one function
    `main` whose parameters are the graph's inputs, in order and by name. Raises EmberdError when
    the block uses an operator that has no conversion.
    """
    shapes: dict[str, list[Any]] = {}
    for value in model.graph.input:
        if value.name in _TOKEN_INPUTS:
            dimensions = value.type.tensor_type.shape.dim
            shapes[value.name] = [tokens, *(dimension.dim_value for dimension in dimensions[1:])]
        elif value.name in _CACHES and cache_dtype != "float32":
            _positions, heads, size = value.type.tensor_type.shape.dim
            row = row_elements(size.dim_value, int(cache_dtype.removeprefix("int")))
            shapes[value.name] = [tvm.tirx.Var("capacity", "int64"), heads.dim_value, row]
    opset = next(entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx"))
    dtypes = dict.fromkeys(_CACHES, cache_dtype)
    importer = _BlockImporter(shapes, dtypes, keep_params_in_input=False, sanitize=False)
    return importer.from_onnx(model.graph, opset)


class _BlockImporter(ONNXGraphImporter):  # type: ignore[misc]
    """TVM's importer, taught the local functions of the blocks."""

    def _check_for_unsupported_ops(self, graph: onnx.GraphProto) -> None:
        standard = onnx.GraphProto()
        standard.node.extend(node for node in graph.node if node.op_type not in _FUNCTIONS)
        try:
            super()._check_for_unsupported_ops(standard)
        except tvm.error.OpNotImplemented as error:
            raise EmberdError(f"block {graph.name}: {error}") from error

    def _convert_operator(
        self, op_name: str, inputs: list[relax.Expr], attrs: dict[str, Any], opset: int
    ) -> relax.Expr:
        if op_name in _FUNCTIONS:
            return self.bb.emit(_FUNCTIONS[op_name](list(inputs), attrs))
        return super()._convert_operator(op_name, inputs, attrs, opset)


def _causal_convolution(inputs: list[relax.Expr], attributes: dict[str, Any]) -> relax.Call:
    x, _weight, state = inputs
    return operators.call("causal_convolution", inputs, [], [x.ty, state.ty])


def _gated_delta_rule(inputs: list[relax.Expr], attributes: dict[str, Any]) -> relax.Call:
    qkv, *_gates, state = inputs
    names = ("key_heads", "value_heads", "key_dim", "value_dim")
    key_heads, value_heads, key_dim, value_dim = (int(attributes[name]) for name in names)
    result = operators.tensor([qkv.ty.shape[0], value_heads * value_dim])
    scalars = [key_heads, value_heads, key_dim, value_dim]
    return operators.call("gated_delta_rule", inputs, scalars, [result, state.ty])


def _rotary_embedding(inputs: list[relax.Expr], attributes: dict[str, Any]) -> relax.Call:
    x, positions = inputs
    rotary_dim, theta = int(attributes["rotary_dim"]), float(attributes["theta"])
    constant = relax.const(inverse_frequencies(rotary_dim, theta))
    return operators.call("rotary_embedding", [x, positions, constant], [rotary_dim], x.ty)


def _cached_attention(inputs: list[relax.Expr], attributes: dict[str, Any]) -> relax.Call:
    query, _key, _value, _positions, key_cache, value_cache = inputs
    tokens, heads, head_dim = query.ty.shape
    result = operators.tensor([tokens, heads * head_dim])
    return operators.call("cached_attention", inputs, [], [result, key_cache.ty, value_cache.ty])


_FUNCTIONS: dict[str, Callable[[list[relax.Expr], dict[str, Any]], relax.Call]] = {
    "CausalConvolution": _causal_convolution,
    "GatedDeltaRule": _gated_delta_rule,
    "RotaryEmbedding": _rotary_embedding,
    "CachedAttention": _cached_attention,
}
