"""Checkpoint layouts that mean the same, and the errors for those that mean nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from checkpoints import (
    MODELS,
    Tensors,
    TinyModel,
    tensors,
    unfused,
    with_vision,
    write_checkpoint,
)
from emberd.compile.checkpoint.huggingface import INDEX_FILE, Checkpoint
from emberd.compile.weights import WeightReader
from emberd.daemon.errors import EmberdError

TINY = TinyModel("layouts", layers="DA", hidden=32, vocab=40, experts=3, intermediate=16, shared=8)


def stored(folder: Path) -> dict[tuple[str, int | None, str], np.ndarray]:
    """Every weight of every block as the references give it."""
    checkpoint = Checkpoint.open(folder)
    reader = WeightReader(checkpoint.shards)
    return {
        (instance.block, instance.layer, name): reader.read(reference).reshape(reference.shape)
        for instance in checkpoint.stack()
        for name, reference in instance.weights.items()
    }


@pytest.mark.parametrize("vision", [False, True], ids=["text", "whole"])
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("fused", [True, False], ids=["banks", "per-expert"])
def test_layouts_give_the_same_weights(
    tmp_path: Path, vision: bool, shards: int, fused: bool
) -> None:
    drawn = tensors(TINY)
    weights = drawn if fused else unfused(drawn)
    weights = with_vision(weights) if vision else weights
    found = stored(write_checkpoint(tmp_path, TINY, weights, vision=vision, shards=shards))
    assert len(found) == len(drawn)
    for block, layer, name, source in (
        ("embed", None, "embedding", "model.embed_tokens.weight"),
        ("gated_delta", 0, "in_proj_qkv", "model.layers.0.linear_attn.in_proj_qkv.weight"),
        ("gated_delta", 0, "A_log", "model.layers.0.linear_attn.A_log"),
        ("gated_attention", 1, "o_proj", "model.layers.1.self_attn.o_proj.weight"),
        ("moe", 1, "router", "model.layers.1.mlp.gate.weight"),
        ("moe", 0, "experts_gate_up", "model.layers.0.mlp.experts.gate_up_proj"),
        ("moe", 1, "experts_down", "model.layers.1.mlp.experts.down_proj"),
        ("head", None, "lm_head", "lm_head.weight"),
    ):
        np.testing.assert_array_equal(found[block, layer, name], drawn[source])
    conv = drawn["model.layers.0.linear_attn.conv1d.weight"]
    np.testing.assert_array_equal(found["gated_delta", 0, "conv"], conv[:, 0, :])


def test_a_tied_head_is_the_embedding(tmp_path: Path) -> None:
    tied = next(model for model in MODELS if model.tied)
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path, tied))
    stack = checkpoint.stack()
    assert checkpoint.tied
    assert stack[-1].weights["lm_head"] == stack[0].weights["embedding"]


def test_a_stored_head_wins_over_tying(tmp_path: Path) -> None:
    tied = next(model for model in MODELS if model.tied)
    weights = tensors(tied)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] * 2
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path, tied, weights))
    assert not checkpoint.tied
    assert checkpoint.stack()[-1].weights["lm_head"].name == "lm_head.weight"


def test_other_parts_are_ignored_with_a_reason(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, TINY, with_vision(tensors(TINY)), vision=True)
    ignored = Checkpoint.open(folder).ignored()
    assert [(part.part, part.tensors, part.bytes) for part in ignored] == [
        ("vision tower", 1, 64),
        ("multi-token prediction", 1, 128),
    ]
    assert all(part.reason for part in ignored)


def remove(name: str) -> Callable[[Tensors], None]:
    return lambda weights: weights.__delitem__(name)


def store(name: str, *shape: int) -> Callable[[Tensors], None]:
    return lambda weights: weights.__setitem__(name, np.zeros(shape, np.float32))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (remove("model.norm.weight"), r"missing tensor model.norm.weight \[32\]"),
        (remove("lm_head.weight"), r"missing tensor lm_head.weight \[40, 32\]"),
        (remove("model.embed_tokens.weight"), "missing tensor model.embed_tokens.weight"),
        (
            remove("model.layers.1.mlp.gate.weight"),
            r"missing tensor model.layers.1.mlp.gate.weight \[3, 32\]",
        ),
        (
            remove("model.layers.0.mlp.experts.down_proj"),
            r"missing tensor model.layers.0.mlp.experts.down_proj \[3, 32, 16\]",
        ),
        (
            store("model.layers.1.self_attn.k_proj.weight", 64, 32),
            r"k_proj.weight in model.safetensors: expected shape \[128, 32\], found \[64, 32\]",
        ),
        (
            store("model.layers.0.linear_attn.conv1d.weight", 256, 2, 4),
            r"conv1d.weight in .*: expected shape \[256, 4\], found \[256, 2, 4\]",
        ),
        (
            store("model.layers.2.input_layernorm.weight", 32),
            r"unexpected tensor model.layers.2.input_layernorm.weight \[32\] in model.safetensors",
        ),
        (
            store("model.layers.0.mlp.gate.bias", 3),
            "unexpected tensor model.layers.0.mlp.gate.bias",
        ),
    ],
)
def test_wrong_tensors_are_named(
    tmp_path: Path, change: Callable[[Tensors], None], reason: str
) -> None:
    weights = tensors(TINY)
    change(weights)
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path, TINY, weights))
    with pytest.raises(EmberdError, match=reason) as raised:
        checkpoint.stack()
    assert str(tmp_path) in str(raised.value)


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    weights = unfused(tensors(TINY))
    del weights["model.layers.1.mlp.experts.2.up_proj.weight"]
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path, TINY, weights))
    with pytest.raises(EmberdError, match=r"missing tensor .*experts.2.up_proj.weight \[16, 32\]"):
        checkpoint.stack()


def test_many_problems_make_one_short_error(tmp_path: Path) -> None:
    weights = {name: x for name, x in tensors(TINY).items() if ".layers.0." not in name}
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path, TINY, weights))
    with pytest.raises(EmberdError, match="and 13 more like these") as raised:
        checkpoint.stack()
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 1000


def test_other_dtypes_are_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, TINY)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"dtype": "F32"', b'"dtype": "I32"', 1))
    with pytest.raises(
        EmberdError, match=r"embed_tokens\.weight in .*: expected dtype F32.*found I32"
    ):
        Checkpoint.open(folder).stack()


def change_index(folder: Path, change: Callable[[dict[str, str]], None]) -> None:
    index = json.loads((folder / INDEX_FILE).read_text())
    change(index["weight_map"])
    (folder / INDEX_FILE).write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: m.update(a="model-00009-of-00002.safetensors"), "00009.*: missing shard; model"),
        (lambda m: m.update(a="../model.safetensors"), "'../model.safetensors' is not the name of"),
        (lambda m: m.update(a="model-00001-of-00002.safetensors"), "tensor a of .* is not in it"),
        (lambda m: m.pop("lm_head.weight"), "holds tensor lm_head.weight, which .* in no shard"),
        (
            lambda m: m.update({"lm_head.weight": "model-00001-of-00002.safetensors"}),
            "holds tensor lm_head.weight, which .* places in model-00001",
        ),
        (lambda m: m.update(a=3), r"weight_map.a: expected a string, found 3"),
    ],
)
def test_wrong_indices_are_refused(
    tmp_path: Path, change: Callable[[dict[str, str]], None], reason: str
) -> None:
    folder = write_checkpoint(tmp_path, TINY, shards=2)
    change_index(folder, change)
    with pytest.raises(EmberdError, match=reason):
        Checkpoint.open(folder)


def test_folders_without_weights_are_refused(tmp_path: Path) -> None:
    (write_checkpoint(tmp_path, TINY) / "model.safetensors").unlink()
    with pytest.raises(EmberdError, match="neither model"):
        Checkpoint.open(tmp_path)
    with pytest.raises(EmberdError, match="not a folder; expected a Hugging Face checkpoint"):
        Checkpoint.open(tmp_path / "config.json")
