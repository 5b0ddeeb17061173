"""quantise gives each weight the format of the recipe, and changes no number but the weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from emberd.compile.passes import operators
from emberd.compile.passes.operators import static_shape, tensor
from emberd.compile.passes.quantise import quantise
from emberd.compile.passes.rewrite import report
from emberd.compile.quantize.formats import FORMATS, pack_expert, unpack_expert
from emberd.compile.quantize.recipes import RECIPES
from relax_functions import Array, calls, function, random, run
from tvm import relax, tirx
from tvm.relax import op

TOKENS, HIDDEN, OUTPUTS = 3, 32, 48
EXPERTS, TOP_K, INTERMEDIATE = 3, 2, 64
IDS = np.array([[2, 0], [1, 2], [0, 1]], np.int32)
ROUTED = (random(TOKENS, TOP_K), random(EXPERTS, 2 * INTERMEDIATE, HIDDEN) / 4)
DOWN = random(EXPERTS, HIDDEN, INTERMEDIATE) / 4


def _types(module: tvm.IRModule) -> dict[str, tuple[str, list[int | str]]]:
    """dtype and shape of each parameter, by name and in order; unknown dimensions by their name."""
    return {
        parameter.name: (
            str(parameter.ty.dtype),
            [str(n.name) if isinstance(n, tirx.Var) else int(n) for n in parameter.ty.shape],
        )
        for parameter in module["main"].params
    }


def _parse(module: tvm.IRModule) -> list[operators.OperatorCall]:
    bindings = module["main"].body.blocks[0].bindings
    parsed = [operators.parse(binding.value) for binding in bindings]
    return [call for call in parsed if call is not None]


def _linear(weight: str) -> tvm.IRModule:
    def body(emit: Any, x: Any, matrix: Any) -> Any:
        return operators.call("linear", [x, matrix], [], tensor([TOKENS, OUTPUTS]))

    return function({"x": (TOKENS, HIDDEN), weight: (OUTPUTS, HIDDEN)}, body)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_weight_of_a_linear_takes_the_format_of_the_recipe(recipe: str) -> None:
    x, weight = random(TOKENS, HIDDEN), random(OUTPUTS, HIDDEN)
    name = RECIPES[recipe].matrices
    before = _linear("q_proj")
    after = quantise(RECIPES[recipe], "gated_attention")(before)
    packed = FORMATS[name].pack(weight)
    argument = weight if name == "f32" else packed
    assert list(_types(after)) == ["x", "q_proj"]
    assert _types(after)["q_proj"] == (str(argument.dtype), [*argument.shape])
    assert _parse(after)[0].scalars == [name, OUTPUTS, HIDDEN, RECIPES[recipe].activations]
    assert report(after) == [f"quantise: {name} x 1"]
    expected = run(before, x, FORMATS[name].unpack(packed, OUTPUTS, HIDDEN))
    np.testing.assert_array_equal(run(after, x, argument), expected)


def test_weights_that_the_recipe_keeps_stay_float() -> None:
    after = quantise(RECIPES["q4"], "gated_delta")(_linear("in_proj_a"))
    assert _types(after)["in_proj_a"][0] == "float32"
    assert _parse(after)[0].scalars[-1] == "float32"
    assert report(after) == ["quantise: f32 x 1"]


def test_an_embedding_takes_the_format_of_the_vocabulary() -> None:
    def body(emit: Any, tokens: Any, embedding: Any) -> Any:
        return operators.call("embedding", [tokens, embedding], [], tensor([TOKENS, HIDDEN]))

    parameters = {"tokens": tensor([TOKENS], "int32"), "embedding": (OUTPUTS, HIDDEN)}
    after = quantise(RECIPES["q4"], "embed")(function(parameters, body))
    table = random(OUTPUTS, HIDDEN)
    packed = FORMATS["q8"].pack(table)
    tokens = np.array([47, 0, 5], np.int32)
    expected = FORMATS["q8"].unpack(packed, OUTPUTS, HIDDEN)[tokens]
    np.testing.assert_array_equal(run(after, tokens, packed), expected)


def _experts(fused: bool) -> tvm.IRModule:
    """A mixture's experts: one moe, or the two gathers that are left without moa_fusion."""

    def body(emit: Any, x: Any, ids: Any, weights: Any, scores: Any, *matrices: Any) -> Any:
        if fused:
            return operators.call("moe", [x, ids, weights, scores, *matrices], [], x.ty)
        return tuple(
            operators.call(
                "gather_experts",
                [ids, experts],
                [],
                tensor([TOKENS, TOP_K, *static_shape(experts)[1:]]),
            )
            for experts in matrices
        )

    parameters: dict[str, Any] = {
        "x": (TOKENS, HIDDEN),
        "ids": tensor([TOKENS, TOP_K], "int32"),
        "weights": (TOKENS, TOP_K),
        "scores": (TOKENS, 16),
        "experts_gate_up": (EXPERTS, 2 * INTERMEDIATE, HIDDEN),
        "experts_down": (EXPERTS, HIDDEN, INTERMEDIATE),
    }
    return function(parameters, body)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("fused", [True, False])
def test_experts_are_read_from_a_bank_through_a_table(recipe: str, fused: bool) -> None:
    x, scores, (weights, gate_up) = random(TOKENS, HIDDEN), random(TOKENS, 16), ROUTED
    packing = FORMATS[RECIPES[recipe].matrices]
    blobs = [pack_expert(packing, *pair) for pair in zip(gate_up, DOWN, strict=True)]
    unpacked = [unpack_expert(packing, blob, HIDDEN, INTERMEDIATE) for blob in blobs]
    table = np.array([4, 1, 2], np.int32)
    bank = np.zeros((5, len(blobs[0])), np.uint8)
    bank[table] = blobs

    before = _experts(fused)
    after = quantise(RECIPES[recipe], "moe")(before)
    assert list(_types(after)) == ["x", "ids", "weights", "scores", "expert_table", "expert_bank"]
    assert _types(after)["expert_table"] == ("int32", [EXPERTS])
    assert _types(after)["expert_bank"] == ("uint8", ["slots", len(blobs[0])])
    if fused:
        assert _parse(after)[0].scalars[-1] == RECIPES[recipe].activations
    halves: list[Array] = [np.stack(matrices) for matrices in zip(*unpacked, strict=True)]
    expected = run(before, x, IDS, weights, scores, *halves)
    got = run(after, x, IDS, weights, scores, table, bank)
    for one, other in zip(*([r] if fused else r for r in (expected, got)), strict=True):
        np.testing.assert_array_equal(one, other)


def test_operators_without_weights_are_left_alone() -> None:
    def body(emit: Any, x: Any, weight: Any) -> Any:
        norm = operators.call("rms_norm", [x, weight], [1e-6, 0], x.ty)
        return op.matmul(norm, relax.op.permute_dims(x, [1, 0]))

    before = function({"x": (TOKENS, HIDDEN), "q_proj": (HIDDEN,)}, body)
    after = quantise(RECIPES["q4"], "gated_attention")(before)
    assert report(after) == []
    assert calls(after) == calls(before) and _types(after) == _types(before)
