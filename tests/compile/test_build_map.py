"""A build with an activation map moves experts about in their file, and changes nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from activation_maps import random_map
from checkpoints import MODELS, write_checkpoint
from emberd.compile.build import build
from emberd.compile.convert import convert
from emberd.compile.run import core_logits
from emberd.daemon.activation_map import MAP_FILE, ActivationMap
from emberd.daemon.artifact import Artifact
from emberd.daemon.errors import EmberdError
from emberd.targets.registry import find_target

MODEL = MODELS[0]
CHUNKS = (1, 16)


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_checkpoint(folder / "checkpoint", MODEL)
    convert(folder / "checkpoint", folder / "converted", name=MODEL.name)
    return folder / "converted"


@pytest.fixture(scope="module")
def plain(converted: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The artifact without a map."""
    artifact = tmp_path_factory.mktemp("plain") / "artifact"
    build(converted, artifact, "host", "q4", chunk_sizes=CHUNKS)
    return artifact


def _map(plain: Path) -> ActivationMap:
    identity = Artifact.open(plain).model.identity
    return random_map(len(MODEL.layers), MODEL.experts, MODEL.top_k, model=identity)


def _write(found: ActivationMap, folder: Path) -> Path:
    path = folder / "a.map"
    path.write_bytes(found.to_bytes())
    return path


def test_logits_are_the_same_bits(converted: Path, plain: Path, tmp_path: Path) -> None:
    found = _map(plain)
    ordered = tmp_path / "ordered"
    build(
        *(converted, ordered, "host", "q4"),
        chunk_sizes=CHUNKS,
        activation_map=_write(found, tmp_path),
    )
    assert Artifact.open(ordered).expert_policy == find_target("host").expert_policy
    before, after = (plain / "experts.bin").read_bytes(), (ordered / "experts.bin").read_bytes()
    assert before != after and sorted(before) == sorted(after)
    assert (plain / "weights.bin").read_bytes() == (ordered / "weights.bin").read_bytes()
    tokens = MODEL.tokens().tolist()
    np.testing.assert_array_equal(core_logits(plain, tokens), core_logits(ordered, tokens))

    artifact = Artifact.open(ordered)
    assert artifact.model == Artifact.open(plain).model
    shipped = ActivationMap.from_bytes(artifact.read(MAP_FILE))
    shipped.check_model(artifact.model.identity)
    assert shipped == found


def test_a_map_of_another_model_leaves_nothing(
    converted: Path, plain: Path, tmp_path: Path
) -> None:
    path = _write(replace(_map(plain), model="cd" * 32), tmp_path)
    with pytest.raises(EmberdError, match="made for another model"):
        build(
            *(converted, tmp_path / "artifact", "host", "q4"),
            chunk_sizes=CHUNKS,
            activation_map=path,
        )
    assert not (tmp_path / "artifact").exists()


def test_a_file_that_is_no_map_is_refused_at_once(converted: Path, tmp_path: Path) -> None:
    (tmp_path / "a.map").write_text('{"class": "climate"}')
    with pytest.raises(EmberdError, match=r"a\.map: not an activation map of emberc profile"):
        build(*(converted, tmp_path / "artifact", "host", "q4"), activation_map=tmp_path / "a.map")


def test_a_map_of_another_shape_is_refused_at_once(converted: Path, tmp_path: Path) -> None:
    path = _write(random_map(3, 8, 2), tmp_path)
    with pytest.raises(EmberdError, match=r"3 layers of 8 experts.*this model has 4 of 8, 2 a"):
        build(converted, tmp_path / "artifact", "host", "q4", activation_map=path)


def test_the_identity_is_of_the_weights(converted: Path, plain: Path, tmp_path: Path) -> None:
    """Not of chunk sizes and kernels, but of formats and values."""
    identity = Artifact.open(plain).model.identity
    assert len(identity) == 64
    build(converted, tmp_path / "other", "host", "q4", chunk_sizes=(1,), disabled=["moa_fusion"])
    assert Artifact.open(tmp_path / "other").model.identity == identity
    build(converted, tmp_path / "q8", "host", "q8", chunk_sizes=(1,))
    assert Artifact.open(tmp_path / "q8").model.identity != identity
