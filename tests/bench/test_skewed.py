"""A class's own experts carry about 0.8 of its routing weights, in every layer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from checkpoints import TinyModel
from emberd.compile.build import build
from emberd.compile.convert import convert
from emberd.daemon.artifact import Artifact
from emberd.daemon.core import Model
from emberd.daemon.trace import RoutingTrace

from bench import skewed
from bench.skewed import CLASSES, HOT, Habits

SMALL = TinyModel(
    "small_skewed",
    layers="DDDA",
    hidden=512,
    vocab=1024,
    query_heads=4,
    kv_heads=2,
    head_dim=64,
    key_heads=4,
    value_heads=8,
    key_dim=64,
    value_dim=64,
    experts=256,
    top_k=8,
    intermediate=32,
    shared=32,
    dtype="BF16",
)


def test_classes_have_experts_of_their_own() -> None:
    hot = Habits.of(skewed.SKEWED).hot
    assert hot.shape == (4, CLASSES, HOT)
    for layer in hot:
        assert len(set(layer.flat)) == CLASSES * HOT


def test_parts_of_what_is_planted_fit_together() -> None:
    habits = Habits.of(SMALL)
    whole = habits.router(1)(0, 256 * 512)
    parts = [
        habits.router(1)(start, min(1000, 256 * 512 - start)) for start in range(0, 256 * 512, 1000)
    ]
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    hot = habits.hot[1, 3, 5]
    np.testing.assert_allclose(whole.reshape(256, 512)[hot], habits.directions[3] * 4.5 / 512)
    assert not whole.reshape(256, 512)[np.setdiff1d(np.arange(256), habits.hot[1])].any()


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("skewed")
    skewed.write(folder / "checkpoint", SMALL)
    convert(folder / "checkpoint", folder / "converted")
    build(folder / "converted", folder / "artifact", "host", "q4", chunk_sizes=(1, 128))
    return folder / "artifact"


@pytest.mark.parametrize("topic", [0, 3, 7])
def test_hot_experts_carry_their_share(artifact: Path, topic: int) -> None:
    draw = np.random.default_rng(topic)
    tokens = draw.integers(0, SMALL.vocab // CLASSES, 128) * CLASSES + topic
    with Model(Artifact.open(artifact), 2) as model, model.open_session(128) as session:
        with RoutingTrace(model) as trace:
            session.prefill(tokens.tolist())
        routing = trace.take()
    ids, weights = np.asarray(routing.ids), np.asarray(routing.weights)
    for layer, hot in enumerate(Habits.of(SMALL).hot[:, topic]):
        share = weights[:, layer][np.isin(ids[:, layer], hot)].sum() / len(tokens)
        assert 0.7 <= share <= 0.95
        assert len(np.unique(ids[:, layer])) > 2 * HOT  # the others are chosen too
