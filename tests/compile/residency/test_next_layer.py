"""Routers of next layers, asked while batches run: as in onnxruntime, and at no cost to answers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from checkpoints import MODELS, write_checkpoint
from emberd.compile.build import build
from emberd.compile.convert import convert
from emberd.compile.converted import ConvertedModel
from emberd.compile.oracle import Oracle
from emberd.compile.residency.next_layer import NextLayerRouters
from emberd.daemon.artifact import Artifact
from emberd.daemon.core import Model
from needs import needs

needs("tvm")

TINY = next(tiny for tiny in MODELS if len(tiny.layers) > 2)
TOKENS = np.random.default_rng(0).integers(0, TINY.vocab, (9, 3))


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> ConvertedModel:
    folder = tmp_path_factory.mktemp("next_layer")
    return convert(write_checkpoint(folder / "checkpoint", TINY), folder / "converted")


@pytest.fixture(scope="module")
def artifact(converted: ConvertedModel) -> Artifact:
    path = converted.folder.parent / "artifact"
    build(converted.folder, path, "host", "f32", chunk_sizes=(1, 16))
    return Artifact.open(path)


class NextScores(Oracle):
    """Notes what each next router scores the inputs of experts: f32 [tokens, experts] of each."""

    def begin(self) -> None:
        self.scores: list[np.ndarray] = []
        self._layers = [i for i, one in enumerate(self.model.stack) if one.block == "moe"][1:]

    def run(self, block: str, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
        if block == "moe" and len(self.scores) < len(self._layers):
            weights = self.weights(self._layers[len(self.scores)])
            hidden = inputs["hidden"]
            mean_square = (hidden**2).mean(-1, keepdims=True)
            normed = hidden / np.sqrt(mean_square + self.model.dimensions.eps)
            self.scores.append(normed * (1 + weights["post_norm"]) @ weights["router"].T)
        return super().run(block, inputs)


@pytest.mark.parametrize("sessions", [1, 3])
def test_they_expect_what_they_do_in_onnxruntime(
    converted: ConvertedModel, artifact: Artifact, sessions: int
) -> None:
    """Of every token of a batch; equally good experts may be taken for one another."""
    asked, moe = NextLayerRouters(artifact), converted.dimensions.moe
    assert asked.layers == converted.dimensions.layers - 1
    assert asked.count == min(2 * moe.top_k, moe.experts)
    oracle = NextScores(converted)
    right = [oracle.session() for _ in range(sessions)]
    with Model(asked.artifact, 1) as model:
        opened = [model.open_session(len(TOKENS)) for _ in range(sessions)]
        for tokens in TOKENS[:, :sessions]:
            model.step_batch(opened, tokens.tolist())
            found = asked.experts(model, sessions)
            assert found.shape == (sessions, asked.layers, asked.count)
            for number, token in enumerate(tokens):
                oracle.begin()
                right[number].step([token])
                scores = np.concatenate(oracle.scores)
                chosen = np.take_along_axis(scores, found[number].astype(int), -1)
                best = -np.sort(-scores)[:, : asked.count]
                np.testing.assert_allclose(chosen, best, rtol=1e-3, atol=1e-3)


def test_answers_stay_the_same_bits(artifact: Artifact) -> None:
    rows = []
    for opened in (artifact, NextLayerRouters(artifact).artifact):
        with Model(opened, 1) as model:
            sessions = [model.open_session(len(TOKENS)) for _ in range(3)]
            logits = [
                model.step_batch(sessions, step.tolist()).memory().tolist() for step in TOKENS
            ]
        rows.append(logits)
    assert rows[0] == rows[1]


def test_a_program_that_routes_in_another_way_is_left_as_it_is(
    converted: ConvertedModel, tmp_path: Path
) -> None:
    folder = tmp_path / "artifact"
    build(converted.folder, folder, "host", "f32", chunk_sizes=(1,), disabled=["fuse_rms_norm"])
    plain = Artifact.open(folder)
    asked = NextLayerRouters(plain)
    assert (asked.layers, asked.count) == (0, 0) and asked.artifact is plain
    with Model(plain, 1) as model:
        model.step_batch([model.open_session(1)], [0])
        assert asked.experts(model, 1).shape == (1, 0, 0)
