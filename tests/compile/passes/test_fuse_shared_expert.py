"""fuse_shared_expert takes the shared expert of a mixture in the formats of the routed ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tvm
from emberd.compile.blocks import BLOCKS
from emberd.compile.dimensions import Dimensions, MoeDimensions
from emberd.compile.passes import operators
from emberd.compile.passes.fuse_gated_activation import fuse_gated_activation
from emberd.compile.passes.fuse_gated_sum import fuse_gated_sum
from emberd.compile.passes.fuse_linear import fuse_linear
from emberd.compile.passes.fuse_rms_norm import fuse_rms_norm
from emberd.compile.passes.fuse_shared_expert import fuse_shared_expert
from emberd.compile.passes.import_onnx import import_onnx
from emberd.compile.passes.moa_fusion import moa_fusion
from emberd.compile.passes.quantise import quantise
from emberd.compile.passes.rewrite import report
from emberd.compile.passes.simplify_gather import simplify_gather
from emberd.compile.quantize.formats import FORMATS, pack_expert
from emberd.compile.quantize.recipes import RECIPES, Recipe
from relax_functions import Array, agree, calls, function, random
from tvm.relax import op

DIMENSIONS = Dimensions(
    hidden_size=32,
    vocab_size=96,
    layers=1,
    eps=1e-6,
    max_context=128,
    moe=MoeDimensions(experts=4, top_k=2, intermediate_size=32, shared_intermediate_size=64),
)
PHASES = (
    simplify_gather,
    fuse_rms_norm,
    moa_fusion,
    fuse_gated_activation,
    fuse_gated_sum,
    fuse_linear,
)
HIDDEN, WIDTH, EXPERTS, TOKENS = 8, 12, 4, 3


class _MixedRecipe(Recipe):
    """A shared expert of another format than the routed ones."""

    def format_of(self, block: str, weight: str) -> str:
        return "q8" if weight == "shared_up_proj" else super().format_of(block, weight)


def _block(recipe: Recipe) -> tvm.IRModule:
    module = import_onnx(BLOCKS["moe"].build(DIMENSIONS), TOKENS, "float32")
    for phase in PHASES:
        module = phase()(module)
    return quantise(recipe, "moe")(module)


@pytest.mark.parametrize("recipe", ["f32", "q8", "q4a8"])
def test_the_end_of_the_layer_becomes_one_operator(recipe: str) -> None:
    before = _block(RECIPES[recipe])
    after = fuse_shared_expert()(before)
    assert calls(after) == ["emberd.rms_norm", "emberd.router", "emberd.moe"]
    assert report(after)[-1].startswith("fuse_shared_expert: 1 x shared expert (hidden, ")


def test_other_formats_than_those_of_the_routed_experts_stay() -> None:
    mixed = _MixedRecipe(**vars(RECIPES["q4"]))
    other = replace(RECIPES["q4"], matrices="q8")
    before = _block(mixed)
    assert calls(fuse_shared_expert()(before)) == calls(before)
    assert len(calls(fuse_shared_expert()(_block(other)))) == 3


def _end(**changes: Any) -> tvm.IRModule:
    """residual + (moe + sigmoid(expert_gate x) * down(silu(gate x) * (up x))), written by hand."""

    def linear(x: Any, weight: Any, format: str = "f32") -> Any:
        rows, columns = operators.static_shape(weight)
        scalars: list[operators.Scalar] = [format, rows, columns, "float32"]
        return operators.call("linear", [x, weight], scalars, operators.tensor([TOKENS, rows]))

    def body(emit: Any, x: Any, other: Any, residual: Any, *rest: Any) -> Any:
        ids, weights, scores, gate, up, down, expert_gate, table, bank = rest
        activated = [linear(x, gate), linear(changes.get("read", lambda _x, _o: _x)(x, other), up)]
        kind = changes.get("kind", "silu")
        units = emit(
            operators.call("gated_activation", activated, [kind], operators.tensor([TOKENS, WIDTH]))
        )
        scalars: list[operators.Scalar] = ["f32", HIDDEN, HIDDEN, EXPERTS, "float32"]
        routed = operators.call("moe", [x, ids, weights, scores, table, bank], scalars, x.ty)
        parts = [linear(x, expert_gate), linear(units, down), routed, residual]
        result = operators.call("gated_sum", parts, [], x.ty)
        return (result, op.tanh(units)) if changes.get("units_are_read") else result

    types = {name: operators.tensor(array.shape, str(array.dtype)) for name, array in ARGUMENTS}
    return function(types, body)


def _arguments() -> list[tuple[str, Array]]:
    pairs = [
        (random(2 * HIDDEN, HIDDEN, seed=e) / 4, random(HIDDEN, HIDDEN, seed=e))
        for e in range(EXPERTS)
    ]
    rows = (TOKENS, HIDDEN)
    return [
        ("x", random(*rows)),
        ("other", random(*rows, seed=1)),
        ("residual", random(*rows, seed=2)),
        ("ids", np.array([[3, 0], [1, 2], [0, 3]], np.int32)),
        ("weights", random(TOKENS, 2)),
        ("scores", random(TOKENS, EXPERTS)),
        ("gate", random(WIDTH, HIDDEN)),
        ("up", random(WIDTH, HIDDEN, seed=1)),
        ("down", random(HIDDEN, WIDTH)),
        ("expert_gate", random(1, HIDDEN)),
        ("table", np.array([2, 0, 3, 1], np.int32)),
        ("bank", np.stack([pack_expert(FORMATS["f32"], *pair) for pair in pairs])),
    ]


ARGUMENTS = _arguments()


@pytest.mark.parametrize("change", [{}, {"units_are_read": True}], ids=["all", "units_are_read"])
def test_it_computes_the_same(change: dict[str, Any]) -> None:
    before = _end(**change)
    after = fuse_shared_expert()(before)
    assert "emberd.gated_sum" not in calls(after)
    assert agree(before, after, *(array for _name, array in ARGUMENTS))


@pytest.mark.parametrize(
    "change",
    [{"kind": "sigmoid"}, {"read": lambda _x, other: other}],
    ids=["another_activation", "another_input"],
)
def test_other_expressions_are_left_alone(change: dict[str, Any]) -> None:
    before = _end(**change)
    after = fuse_shared_expert()(before)
    tvm.ir.assert_structural_equal(after, before)
    assert report(after) == []
