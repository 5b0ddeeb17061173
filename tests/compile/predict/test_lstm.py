"""Networks as files: onnxruntime does what numpy does, window by window."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from emberd.compile.predict.lstm import Lstm
from emberd.compile.predict.network import check, reference, to_onnx
from emberd.compile.predict.predictor import AHEAD, WINDOW
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


def test_scores_are_those_of_each_window_in_numpy(path: Path) -> None:
    found = noise(HEADER, TOKENS, 10, 0)
    scores = Lstm(path, HEADER).scores(found)
    assert scores.shape == (TOKENS, AHEAD, 3, 8)
    for token in range(TOKENS):
        hidden = cell = np.zeros((1, 7), np.float32)
        for ids in found.ids[max(0, token - WINDOW + 1) : token + 1]:
            expected, hidden, cell = reference(WEIGHTS, ids[None].astype(int), hidden, cell)
        np.testing.assert_allclose(scores[token], expected[0], rtol=1e-4, atol=1e-6)


def test_it_sees_the_last_sixteen_tokens_and_none_to_come(path: Path) -> None:
    found = noise(HEADER, TOKENS, 10, 0)
    ids = found.ids.copy()
    ids[20] = noise(HEADER, 1, 0, 9).ids
    changed = Lstm(path, HEADER).scores(replace(found, ids=ids))
    differ = (changed != Lstm(path, HEADER).scores(found)).any(axis=(1, 2, 3))
    assert np.flatnonzero(differ).tolist() == list(range(20, 20 + WINDOW))


def test_weights_are_counted(path: Path) -> None:
    weights = Lstm(path, HEADER).weights
    for name, value in WEIGHTS.named().items():
        np.testing.assert_array_equal(weights.named()[name], value)
    assert weights.count == 24 * 5 + 28 * (5 + 7 + 1) + 15 * (7 + 1) + 3 * 24
    assert weights.multiplications == 16 * 28 * (5 + 7) + 15 * 7 + 3 * 24 * 5


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
