"""The report tells what is there, counted by hand here, and what is not."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from checkpoints import (
    MODELS,
    TinyModel,
    configuration,
    tensors,
    unfused,
    with_vision,
    write_checkpoint,
)
from emberd.compile.cli import main
from emberd.compile.inspect import inspect, text

TINY = TinyModel("seen", layers="DDDADDDA", hidden=32, vocab=40, experts=4, top_k=1, shared=8)


@pytest.mark.parametrize("per_expert", [False, True])
def test_counts(tmp_path: Path, per_expert: bool) -> None:
    drawn = tensors(TINY)
    report = inspect(write_checkpoint(tmp_path, TINY, unfused(drawn) if per_expert else drawn))
    total = sum(weight.size for weight in drawn.values())
    experts = sum(weight.size for name, weight in drawn.items() if ".experts." in name)
    embedding = drawn["model.embed_tokens.weight"].size
    assert report.parameters.total == total
    assert report.parameters.experts == experts
    assert report.parameters.embedding == embedding
    unused = experts * 3 // 4 + embedding - TINY.hidden
    assert report.parameters.active == total - unused
    assert report.bytes == 4 * total and report.dtypes == {"F32": 4 * total}
    assert report.layers_with_router == report.layers_with_experts == 8
    assert report.stop_tokens == [2, 1]
    assert not report.missing and not report.problems and not report.ignored


def test_a_tied_embedding_counts_once(tmp_path: Path) -> None:
    tied = next(model for model in MODELS if model.tied)
    report = inspect(write_checkpoint(tmp_path, tied))
    drawn = tensors(tied)
    assert report.tied_embeddings
    assert report.parameters.total == sum(weight.size for weight in drawn.values())
    experts = sum(weight.size for name, weight in drawn.items() if ".experts." in name)
    unused = experts * 6 // 8 - tied.hidden  # a row is read, and the head multiplies by all
    assert report.parameters.active == report.parameters.total - unused


def test_text_is_for_people(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, TINY, with_vision(tensors(TINY)), vision=True, shards=2)
    lines = text(inspect(folder)).splitlines()
    rows = [(line[:19].strip(), line[20:]) for line in lines]
    values = dict(rows)
    assert values["architecture"] == "qwen3_5_moe"
    assert values["layers"] == "8: 2 x (3 gated_delta + 1 gated_attention)"
    assert values["files"] == "2 shards"
    assert values["routers"] == "present in 8 of 8 layers"
    assert values["convertible"] == "yes, as far as headers tell"
    ignored = [value for label, value in rows if label == "ignored"]
    assert ignored[0].startswith("vision tower (1 tensor, 64 bytes): emberd runs the language")
    assert ignored[1].startswith("multi-token prediction (1 tensor, 128 bytes)")


@pytest.mark.parametrize(
    ("layers", "described"),
    [
        ("D", "1: 1 gated_delta"),
        ("AA", "2: 2 x gated_attention"),
        ("DA", "2: 1 gated_delta + 1 gated_attention"),
        ("DADA", "4: 2 x (1 gated_delta + 1 gated_attention)"),
        ("DDA" * 2 + "A", "7: 2 gated_delta + 1 gated_attention + 2 gated_delta + 2 gated_att"),
    ],
)
def test_stacks_are_described_shortly(tmp_path: Path, layers: str, described: str) -> None:
    tiny = TinyModel("stack", layers=layers, hidden=32, experts=2, intermediate=8, shared=8)
    assert f"layers              {described}" in text(inspect(write_checkpoint(tmp_path, tiny)))


def test_headers_are_enough(tmp_path: Path) -> None:
    """A sparse file of the right size has all the headers say, and no weights."""
    folder = write_checkpoint(tmp_path, TINY)
    file = folder / "model.safetensors"
    content = file.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    with file.open("wb") as stream:
        stream.write(content[:header])
        stream.truncate(len(content))
    assert not inspect(folder).problems


def test_what_is_missing_is_said_and_not_fatal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = tensors(TINY)
    del weights["model.layers.2.mlp.gate.weight"]
    del weights["model.layers.5.mlp.experts.down_proj"]
    weights["model.layers.0.mlp.gate.bias"] = np.zeros(4, np.float32)
    write_checkpoint(tmp_path, TINY, weights)
    assert main(["inspect", str(tmp_path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["missing"] == [
        "model.layers.2.mlp.gate.weight",
        "model.layers.5.mlp.experts.down_proj",
    ]
    assert report["layers_with_router"] == report["layers_with_experts"] == 7
    assert len(report["problems"]) == 3
    assert report["dimensions"]["moe"]["top_k"] == 1
    assert main(["inspect", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "problem             missing tensor model.layers.2.mlp.gate.weight" in printed
    assert "convertible         no" in printed


def test_long_lists_of_problems_are_cut(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, TINY, {"model.norm.weight": np.zeros(32, np.float32)})
    report = inspect(tmp_path)
    lines = [line for line in text(report).splitlines() if line.startswith("problem")]
    assert len(lines) == 11
    assert lines[-1].endswith(f"and {len(report.problems) - 10} more like these")


def test_a_wrong_configuration_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_checkpoint(tmp_path, TINY)
    config = {**configuration(TINY), "model_type": "mamba"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["inspect", str(tmp_path)]) == 2
    assert "unknown architecture 'mamba'" in capsys.readouterr().err
