"""Loading a converted model: parts of weights, and every way in which model.yaml can be wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from checkpoints import TinyModel, tensors, unfused, write_checkpoint
from emberd.compile.convert import convert
from emberd.compile.converted import ConvertedModel
from emberd.daemon.errors import EmberdError

TINY = TinyModel("loading", layers="DA", hidden=32, vocab=40, experts=3, intermediate=16, shared=8)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return convert(write_checkpoint(tmp_path / "source", TINY), tmp_path / "model").folder


def test_a_model_loads_as_it_was_described(folder: Path) -> None:
    model = ConvertedModel.load(folder)
    assert (model.name, model.architecture) == ("source", "qwen3_5_moe")
    assert model.stop_tokens == (2, 1)
    assert [(instance.block, instance.layer) for instance in model.stack] == [
        ("embed", None),
        ("gated_delta", 0),
        ("moe", 0),
        ("gated_attention", 1),
        ("moe", 1),
        ("head", None),
    ]
    assert model.dimensions.moe.experts == 3 and model.dimensions.layers == 2
    for instance in model.stack:
        inputs = {value.name for value in model.block_model(instance.block).graph.input}
        assert inputs > set(instance.weights)


@pytest.mark.parametrize("per_expert", [False, True])
def test_parts_of_weights(tmp_path: Path, per_expert: bool) -> None:
    drawn = tensors(TINY)
    source = write_checkpoint(tmp_path / "a", TINY, unfused(drawn) if per_expert else drawn)
    model = convert(source, tmp_path / "b")
    bank = drawn["model.layers.1.mlp.experts.gate_up_proj"]
    reference = model.stack[4].weights["experts_gate_up"]
    np.testing.assert_array_equal(model.read_weight(reference), bank)
    np.testing.assert_array_equal(model.read_weight(reference, rows=slice(1, 3)), bank[1:])
    np.testing.assert_array_equal(model.read_weight(reference, rows=slice(2, 1)), bank[2:1])
    for expert in range(3):
        np.testing.assert_array_equal(model.read_expert(reference, expert), bank[expert])
    embedding = model.stack[0].weights["embedding"]
    expected = drawn["model.embed_tokens.weight"]
    np.testing.assert_array_equal(model.read_weight(embedding, slice(7, 9)), expected[7:9])
    np.testing.assert_array_equal(model.read_weight(embedding, index=39), expected[39])
    with pytest.raises(ValueError, match="do not exist"):
        model.read_expert(reference, 3)


Change = Callable[[dict[str, Any]], Any]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: m.update(format="other"), "format: expected 'emberd-converted', found 'other'"),
        (lambda m: m.update(version=2), "version: expected version 1, .* found 2"),
        (lambda m: m.pop("name"), "missing key 'name'"),
        (lambda m: m.update(name=""), "name: expected a string, found ''"),
        (lambda m: m.update(tied_embeddings=0), "tied_embeddings: expected true or false"),
        (lambda m: m.update(stop_tokens=[40]), r"stop_tokens\[0\]: expected an integer in 0..39"),
        (lambda m: m.update(stop_tokens=1), "stop_tokens: expected a list, found 1"),
        (lambda m: m["dimensions"].update(eps=0), "dimensions.eps: expected a number above 0"),
        (lambda m: m["dimensions"].update(layers=3), r"stack\[5\]: the stack must be embed"),
        (lambda m: m["dimensions"].pop("moe"), "dimensions: missing key 'moe'"),
        (lambda m: m["dimensions"]["moe"].update(top_k=4), r"moe.top_k: .* in 1..3, found 4"),
        (lambda m: m["dimensions"]["moe"].update(experts=2), r"router.shape: .* \[2, 32\]"),
        (lambda m: m["dimensions"].pop("attention"), r"stack\[3\].block: expected a block whose"),
        (lambda m: m["dimensions"]["attention"].update(kv_heads=3), "a multiple of kv_heads"),
        (lambda m: m["dimensions"]["attention"].update(rotary_dim=7), "expected an even number"),
        (lambda m: m["dimensions"]["attention"].update(rotary_dim=66), r"in 2..64, found 66"),
        (lambda m: m["dimensions"]["gated_delta"].update(conv_kernel=1), "conv_kernel: expected"),
        (lambda m: m["dimensions"]["gated_delta"].update(key_heads=3), "a multiple of key_heads"),
        (lambda m: m["shards"].clear(), "expected a shard that is listed"),
        (lambda m: m["shards"]["model.safetensors"].update(path="no"), "no: weights named by"),
        (lambda m: m["shards"]["model.safetensors"].update(bytes=9), "expected 9 bytes as when"),
        (lambda m: m["stack"].pop(), r"stack\[5\]: the stack must be embed"),
        (lambda m: m["stack"].pop(1), r"stack\[1\]: the stack must be embed"),
        (lambda m: m["stack"].insert(1, m["stack"][2]), r"stack\[1\]: the stack must be embed"),
        (lambda m: m["stack"][2].update(layer=1), r"stack\[2\]: the stack must be embed"),
        (lambda m: m["stack"][2].update(layer=2), r"stack\[2\].layer: .* in 0..1, found 2"),
        (lambda m: m["stack"][0].update(block="rnn"), r"stack\[0\].block: expected one of embed"),
        (lambda m: m["stack"][0]["weights"].clear(), "expected exactly the weights embedding"),
        (lambda m: m["stack"].append(3), r"stack\[6\]: expected a mapping, found 3"),
        (lambda m: embedding(m).update(dtype="f8"), "embedding.dtype: expected one of f32"),
        (lambda m: embedding(m).update(shape=[32, 40]), r"expected the shape \[40, 32\], found"),
        (lambda m: embedding(m).update(offset=-1), "embedding.offset: expected an integer of at"),
        (lambda m: embedding(m).update(offset=10**9), "model.embed_tokens.weight ends at byte"),
        (lambda m: embedding(m).update(pieces=[]), "a number of pieces that divides"),
    ],
)
def test_wrong_descriptions_are_refused(folder: Path, change: Change, reason: str) -> None:
    file = folder / "model.yaml"
    content = yaml.safe_load(file.read_text())
    change(content)
    file.write_text(yaml.safe_dump(content))
    with pytest.raises(EmberdError, match=reason) as raised:
        ConvertedModel.load(folder)
    assert "\n" not in str(raised.value)


def embedding(content: dict[str, Any]) -> dict[str, Any]:
    weight: dict[str, Any] = content["stack"][0]["weights"]["embedding"]
    return weight


@pytest.mark.parametrize(
    ("text", "reason"),
    [("a: [", "not valid YAML"), ("- 1", "expected a mapping"), ("", "expected a mapping")],
)
def test_damaged_descriptions_are_refused(folder: Path, text: str, reason: str) -> None:
    (folder / "model.yaml").write_text(text)
    with pytest.raises(EmberdError, match=reason):
        ConvertedModel.load(folder)


def test_missing_files_are_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(EmberdError, match=r"not a converted model \(no model\.yaml\)"):
        ConvertedModel.load(tmp_path)
    (folder / "blocks" / "moe.onnx").unlink()
    with pytest.raises(EmberdError, match=r"blocks/moe\.onnx: missing; convert the model again"):
        ConvertedModel.load(folder)


@pytest.mark.parametrize("content", [b"", b"not a graph"])
def test_damaged_blocks_are_refused(folder: Path, content: bytes) -> None:
    (folder / "blocks" / "head.onnx").write_bytes(content)
    with pytest.raises(EmberdError, match=r"head\.onnx: not a valid ONNX model"):
        ConvertedModel.load(folder).block_model("head")
