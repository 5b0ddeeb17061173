"""A recipe names an existing format for every weight, and the precision of its inputs."""

import pytest
from emberd.compile.quantize.formats import FORMATS
from emberd.compile.quantize.recipes import RECIPES

WEIGHTS = [
    ("embed", "embedding", "vocabulary"),
    ("head", "lm_head", "vocabulary"),
    ("head", "final_norm", "float"),
    ("gated_delta", "in_proj_qkv", "matrix"),
    ("gated_delta", "in_proj_z", "matrix"),
    ("gated_delta", "out_proj", "matrix"),
    ("gated_delta", "in_proj_a", "float"),
    ("gated_delta", "conv", "float"),
    ("gated_attention", "q_proj", "matrix"),
    ("gated_attention", "o_proj", "matrix"),
    ("gated_attention", "q_norm", "float"),
    ("moe", "experts_gate_up", "matrix"),
    ("moe", "experts_down", "matrix"),
    ("moe", "shared_down_proj", "matrix"),
    ("moe", "router", "float"),
    ("moe", "shared_expert_gate", "float"),
]
EXPECTED = {
    "f32": {"matrix": "f32", "vocabulary": "f32", "float": "f32"},
    "q8": {"matrix": "q8", "vocabulary": "q8", "float": "f32"},
    "q4": {"matrix": "q4", "vocabulary": "q8", "float": "f32"},
    "q4kv8": {"matrix": "q4", "vocabulary": "q8", "float": "f32"},
    "q4a8": {"matrix": "q4", "vocabulary": "q8", "float": "f32"},
}
ACTIVATIONS = {"f32": "float32", "q8": "int16", "q4": "int16", "q4kv8": "int16", "q4a8": "int8"}


@pytest.mark.parametrize(("block", "weight", "kind"), WEIGHTS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_format_of_each_weight(recipe: str, block: str, weight: str, kind: str) -> None:
    name = RECIPES[recipe].format_of(block, weight)
    assert name == EXPECTED[recipe][kind]
    assert name in FORMATS


@pytest.mark.parametrize(("block", "weight", "kind"), WEIGHTS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_activations_of_each_weight(recipe: str, block: str, weight: str, kind: str) -> None:
    expected = "float32" if kind == "float" else ACTIVATIONS[recipe]
    assert RECIPES[recipe].activations_of(block, weight) == expected
