"""Training: the same network every time, the same in torch and onnxruntime, and one that learns."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from needs import needs
from routed_commands import CYCLE, command, cycle, noise

needs("torch")

import torch  # noqa: E402
from emberd.compile.predict.lstm import Lstm  # noqa: E402
from emberd.compile.predict.network import to_onnx  # noqa: E402
from emberd.compile.predict.recall import measure  # noqa: E402
from emberd.compile.predict.train import Network, train, train_on  # noqa: E402
from emberd.compile.residency.trace import TraceWriter  # noqa: E402
from emberd.daemon.errors import EmberdError  # noqa: E402


@pytest.fixture(scope="module")
def learnt() -> Network:
    """After a few cycles, one of them shorter than a window."""
    return train(CYCLE, [cycle(60, 0), cycle(5, 0), cycle(50, 0, start=1)], steps=60)


def test_it_learns_a_cycle(learnt: Network, tmp_path: Path) -> None:
    (tmp_path / "lstm").write_bytes(to_onnx(learnt.weights(), CYCLE).SerializeToString())
    rows = measure(Lstm(tmp_path / "lstm", CYCLE), [cycle(64, 1, start=2)], CYCLE, [2])
    assert [row.recall for row in rows] == [1, 1, 1]


def test_onnxruntime_does_what_torch_did(learnt: Network, tmp_path: Path) -> None:
    (tmp_path / "lstm").write_bytes(to_onnx(learnt.weights(), CYCLE).SerializeToString())
    found = noise(CYCLE, 30, 10, 3)
    scores = Lstm(tmp_path / "lstm", CYCLE).scores(found)
    with torch.no_grad():
        ids = torch.from_numpy(found.ids.astype(np.int64))
        expected = learnt(ids[None])[0].softmax(-1).numpy()
    np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-5)


def test_training_is_repeatable() -> None:
    commands = [noise(CYCLE, 40, 0, 1), command(cycle(30, 0).ids, 0)]
    one, other = (train(CYCLE, commands, steps=3).weights().named() for _ in range(2))
    for name, value in one.items():
        np.testing.assert_array_equal(value, other[name])


def test_a_trace_with_nothing_to_learn_is_refused(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "short", CYCLE)
    writer.append(cycle(1, 0))
    writer.finish(1)
    writer.close()
    with pytest.raises(EmberdError, match="short: no command of two tokens"):
        train_on(tmp_path / "short", tmp_path / "predictor.onnx", 1)
