"""A build with a predictor ships it compiled, bound to the model, and changes nothing else."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from checkpoints import MODELS, write_checkpoint
from emberd.compile.build import build
from emberd.compile.convert import convert
from emberd.compile.predict.network import to_onnx
from emberd.compile.residency.trace import TraceHeader
from emberd.daemon.artifact import Artifact
from emberd.daemon.cli import main
from emberd.daemon.core import Model
from emberd.daemon.errors import EmberdError
from emberd.targets.registry import find_target
from predictor_networks import random_weights

MODEL = MODELS[0]
LAYERS = len(MODEL.layers)


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_checkpoint(folder / "checkpoint", MODEL)
    convert(folder / "checkpoint", folder / "converted", name=MODEL.name)
    return folder / "converted"


@pytest.fixture(scope="module")
def plain(converted: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The artifact without a predictor."""
    artifact = tmp_path_factory.mktemp("plain") / "artifact"
    build(converted, artifact, "host", "q4", chunk_sizes=(1,))
    return artifact


@pytest.fixture(scope="module")
def predicted(converted: Path, plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The artifact with one."""
    folder = tmp_path_factory.mktemp("predicted")
    identity = Artifact.open(plain).model.identity
    network = write_network(folder, identity, LAYERS)
    build(converted, folder / "artifact", "host", "q4", chunk_sizes=(1,), predictor=network)
    return folder / "artifact"


def write_network(folder: Path, model: str, layers: int) -> Path:
    header = TraceHeader(model, layers, MODEL.experts, MODEL.top_k, expert_bytes=4096)
    path = folder / "network.onnx"
    path.write_bytes(to_onnx(random_weights(header, 32, 32), header).SerializeToString())
    return path


def test_it_is_shipped_compiled_and_the_rest_is_the_same(plain: Path, predicted: Path) -> None:
    artifact = Artifact.open(predicted)
    predictor = artifact.predictor()
    assert predictor.model.identity == artifact.model.identity
    assert predictor.target == artifact.target == find_target("host").name
    assert predictor.model.vocab_size == LAYERS * MODEL.experts
    with Model(predictor, 1) as model:
        assert model.max_chunk == LAYERS * MODEL.top_k
    for file in plain.iterdir():
        if file.name != "manifest.json":
            assert file.read_bytes() == (predicted / file.name).read_bytes()
    manifest = json.loads((predicted / "manifest.json").read_text())
    del manifest["predictor"]
    assert manifest == json.loads((plain / "manifest.json").read_text())
    assert not (plain / "predictor").exists()


def test_an_artifact_without_one_says_so(plain: Path) -> None:
    with pytest.raises(EmberdError, match="has no predictor"):
        Artifact.open(plain).predictor()


@pytest.mark.parametrize("file", ["manifest.json", "program.msgpack", "weights.bin"])
def test_a_damaged_one_is_found(
    predicted: Path, tmp_path: Path, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(predicted, copy)
    assert main(["check", str(copy)]) == 0
    damaged = bytearray((copy / "predictor" / file).read_bytes())
    damaged[-2] ^= 1
    (copy / "predictor" / file).write_bytes(damaged)
    assert main(["check", str(copy)]) == 2
    assert str(copy / "predictor") in capsys.readouterr().err


def test_that_of_another_artifact_is_refused(plain: Path, predicted: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(predicted, copy)
    shutil.rmtree(copy / "predictor")
    shutil.copytree(plain, copy / "predictor")
    with pytest.raises(EmberdError, match="predictor is damaged"):
        Artifact.open(copy).predictor()


def test_a_target_whose_policy_needs_one_is_not_built_without(
    converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = replace(find_target("host"), expert_policy="read-ahead")
    monkeypatch.setattr("emberd.compile.build.find_target", lambda _name: target)
    with pytest.raises(EmberdError, match="read-ahead, which needs a predictor: give --predictor"):
        build(converted, tmp_path / "artifact", "host", "q4")


def test_a_network_of_another_model_leaves_nothing(converted: Path, tmp_path: Path) -> None:
    network = write_network(tmp_path, "cd" * 32, LAYERS)
    with pytest.raises(EmberdError, match="another model"):
        build(
            *(converted, tmp_path / "artifact", "host", "q4"),
            chunk_sizes=(1,),
            predictor=network,
        )
    assert not (tmp_path / "artifact").exists()


def test_a_network_of_another_shape_is_refused_at_once(converted: Path, tmp_path: Path) -> None:
    network = write_network(tmp_path, "cd" * 32, LAYERS + 1)
    with pytest.raises(EmberdError, match=r"5 layers of 8 experts.*this model has 4 of 8, 2 a"):
        build(converted, tmp_path / "artifact", "host", "q4", predictor=network)
