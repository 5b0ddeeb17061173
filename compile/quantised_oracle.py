"""The oracle of a quantised artifact: onnxruntime on the numbers that a recipe leaves of a model.

Weights become what their packed formats hold. The inputs of packed matrices become the integers of
quantize/activations.py times their scales, keys and values what the cache holds of them.
What then differs from the artifact is the order in which floats are added.
"""

from __future__ import annotations

import numpy as np
import onnx
from emberd.compile.blocks import cached_attention
from emberd.compile.blocks.graph import Graph
from emberd.compile.converted import BlockInstance, ConvertedModel
from emberd.compile.kernels.integer_cache import KEY_LIMIT, NORM, VALUE_LIMIT, Kind
from emberd.compile.oracle import Oracle
from emberd.compile.quantize.activations import PLANE_RATIO, Precision
from emberd.compile.quantize.formats import FORMATS, GROUP, pack_expert, unpack_expert
from emberd.compile.quantize.recipes import Recipe

_KEY_AND_VALUE: tuple[tuple[int, Kind], ...] = ((1, "key"), (2, "value"))  # inputs of attention
_SMALLEST = 1e-30  # stands for the largest of a group of zeros


def quantised_oracle(model: ConvertedModel, recipe: Recipe) -> Oracle:
    """Weights and activations as the artifact's kernels see them."""
    return Oracle(
        model,
        lambda instance, name: dequantised(model, recipe, instance, name),
        lambda block: _round_activations(model.block_model(block), recipe, block),
    )


def dequantised(
    model: ConvertedModel, recipe: Recipe, instance: BlockInstance, name: str
) -> np.ndarray:
    """A weight as the artifact's kernels see it: packed in its format and unpacked again."""
    reference = instance.weights[name]
    packing = FORMATS[recipe.format_of(instance.block, name)]
    if name in ("experts_gate_up", "experts_down"):
        halves = [_expert(model, recipe, instance, e) for e in range(reference.shape[0])]
        return np.stack([pair[name == "experts_down"] for pair in halves])
    weight = model.read_weight(reference)
    if packing.name == "f32" or weight.ndim != 2:
        return weight
    return packing.unpack(packing.pack(weight), *weight.shape)


def _expert(
    model: ConvertedModel, recipe: Recipe, instance: BlockInstance, expert: int
) -> tuple[np.ndarray, np.ndarray]:
    packing = FORMATS[recipe.format_of("moe", "experts_down")]
    gate_up = model.read_expert(instance.weights["experts_gate_up"], expert)
    down = model.read_expert(instance.weights["experts_down"], expert)
    return unpack_expert(packing, pack_expert(packing, gate_up, down), *down.shape)


def _round_activations(model: onnx.ModelProto, recipe: Recipe, block: str) -> onnx.ModelProto:
    """`model` with the inputs of packed matrices, and new keys and values, rounded."""
    graph, rounded = Graph("rounded_"), dict[str, str]()
    for original in model.graph.node:
        node = onnx.NodeProto()
        node.CopyFrom(original)
        if node.op_type == "MatMul":
            x = node.input[0]
            precision = recipe.activations_of(block, _weight(model, node.input[1]))
            if precision != "float32":
                if x not in rounded:
                    rounded[x] = _round_groups(graph, x, precision)
                node.input[0] = rounded[x]
        elif node.op_type == cached_attention.NAME and recipe.cache_dtype != "float32":
            bits = int(recipe.cache_dtype.removeprefix("int"))
            for index, kind in _KEY_AND_VALUE:
                node.input[index] = _round_vectors(graph, node.input[index], bits, kind)
        graph.nodes.append(node)
    result = onnx.ModelProto()
    result.CopyFrom(model)
    del result.graph.node[:]
    result.graph.node.extend(graph.nodes)
    onnx.checker.check_model(result)
    return result


def _weight(model: onnx.ModelProto, matrix: str) -> str:
    """The graph input that `matrix` is, seen through Transpose and Gather."""
    producers = {name: node for node in model.graph.node for name in node.output}
    while matrix in producers and producers[matrix].op_type in ("Transpose", "Gather"):
        matrix = producers[matrix].input[0]
    return matrix


def _round_groups(graph: Graph, x: str, precision: Precision) -> str:
    """x f32[.., K] rounded by groups of columns, as `quantise_reference` does it."""
    groups = graph.reshape(x, -1, GROUP)
    largest = graph.add("ReduceMax", graph.add("Abs", groups), graph.constant([-1]), keepdims=1)
    largest = graph.add("Max", largest, graph.constant(_SMALLEST))
    scaled = graph.add("Mul", groups, graph.add("Div", graph.constant(127.0), largest))
    values = graph.add("Round", scaled)
    if precision == "int16":
        ratio = graph.constant(float(PLANE_RATIO))
        rest = graph.add("Mul", graph.add("Sub", scaled, values), ratio)
        values = graph.add("Add", values, graph.add("Div", graph.add("Round", rest), ratio))
    scale = graph.add("Mul", largest, graph.constant(1 / 127))
    return graph.add("Reshape", graph.add("Mul", values, scale), graph.add("Shape", x))


def _round_vectors(graph: Graph, x: str, bits: int, kind: Kind) -> str:
    """x f32[.., D] as integer_cache holds it."""
    axes = graph.constant([-1])
    largest = graph.add("ReduceMax", graph.add("Abs", x), axes, keepdims=1)
    largest = graph.add("Max", largest, graph.constant(_SMALLEST))
    limit = KEY_LIMIT[bits] if kind == "key" else VALUE_LIMIT[bits]
    factor = graph.add("Div", graph.constant(limit), largest)
    if kind == "key":
        norm = graph.add(
            "Max", graph.add("ReduceL2", x, axes, keepdims=1), graph.constant(_SMALLEST)
        )
        factor = graph.add("Min", factor, graph.add("Div", graph.constant(NORM), norm))
    return graph.add("Div", graph.add("Round", graph.add("Mul", x, factor)), factor)
