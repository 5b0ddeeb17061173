"""Networks as files: onnxruntime does what numpy does, window by window."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from emberd.compile.predict.lstm import Lstm
from emberd.compile.predict.network import check, reference, to_onnx
from emberd.compile.predict.predictor import AHEAD
from emberd.compile.residency.trace import TraceHeader
from emberd.daemon.errors import EmberdError
from predictor_networks import random_weights
from routed_commands import noise

HEADER = TraceHeader("ab" * 32, layers=3, experts=8, top_k=2, expert_bytes=4096)
TOKENS = 40


WEIGHTS = random_weights(HEADER, 5, 7, scale=1.0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "predictor.onnx"
    file.write_bytes(to_onnx(WEIGHTS, HEADER).SerializeToString())
    return file


def test_scores_are_those_of_numpy_token_by_token(path: Path) -> None:
    """And every command begins anew."""
    lstm = Lstm(path, HEADER)
    for seed in (0, 1):
        found = noise(HEADER, TOKENS, 10, seed)
        scores = lstm.scores(found)
        assert scores.shape == (TOKENS, AHEAD, 3, 8)
        hidden = cell = np.zeros((1, 7), np.float32)
        for token, ids in enumerate(found.ids):
            expected, hidden, cell = reference(WEIGHTS, ids, hidden, cell)
            np.testing.assert_allclose(scores[token], expected, rtol=1e-4, atol=1e-6)


def test_it_sees_no_token_to_come(path: Path) -> None:
    found = noise(HEADER, TOKENS, 10, 0)
    ids = found.ids.copy()
    ids[20] = noise(HEADER, 1, 0, 9).ids
    changed = Lstm(path, HEADER).scores(replace(found, ids=ids))
    differ = (changed != Lstm(path, HEADER).scores(found)).any(axis=(1, 2, 3))
    assert not differ[:20].any() and differ[20]


def test_what_is_no_predictor_of_the_model_is_refused(path: Path, tmp_path: Path) -> None:
    with pytest.raises(EmberdError, match="another model"):
        Lstm(path, replace(HEADER, model="cd" * 32))
    other = onnx.load_model(path)
    del other.metadata_props[:]
    (tmp_path / "other").write_bytes(other.SerializeToString())
    (tmp_path / "damaged").write_bytes(path.read_bytes()[:-9])
    for name in ("other", "damaged"):
        with pytest.raises(EmberdError, match=f"{name}: not a predictor"):
            Lstm(tmp_path / name, HEADER)


def test_a_file_that_does_something_else_is_noticed() -> None:
    ids = noise(HEADER, 5, 0, 0).ids
    check(to_onnx(WEIGHTS, HEADER), WEIGHTS, ids)
    other = replace(WEIGHTS, state_weight=WEIGHTS.state_weight * np.float32(1.1))
    with pytest.raises(EmberdError, match="onnxruntime does not compute"):
        check(to_onnx(other, HEADER), WEIGHTS, ids)
