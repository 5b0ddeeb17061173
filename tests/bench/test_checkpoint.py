"""The generated checkpoint: readable, deterministic, and of the right size."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from checkpoints import TinyModel, draw
from emberd.compile.convert import convert

from bench import checkpoint

TINY = TinyModel("tiny", layers="DA", hidden=64, dtype="BF16", max_context=9000)


def test_is_a_checkpoint_with_weights_as_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "_PART", 1000)  # several parts to a tensor
    checkpoint.write(tmp_path / "a", TINY)
    model = convert(tmp_path / "a", tmp_path / "converted")
    assert model.dimensions.max_context == 9000
    by_name = {
        reference.name: model.read_weight(reference)
        for instance in model.stack
        for reference in instance.weights.values()
    }
    norm = by_name["model.layers.0.linear_attn.norm.weight"]
    assert norm.mean() == pytest.approx(1, abs=0.2)
    bank = by_name["model.layers.1.mlp.experts.gate_up_proj"]
    assert bank.std() == pytest.approx(1.5 / math.sqrt(64), rel=0.05)
    assert abs(bank.mean()) < 0.01
    parts = bank.reshape(-1)[:5000].reshape(5, 1000)
    assert np.abs(np.corrcoef(parts) - np.eye(5)).max() < 0.2  # each is drawn apart
    decay = by_name["model.layers.0.linear_attn.A_log"]
    assert -3 <= decay.min() < decay.max() <= 2


def test_is_the_same_every_time(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        checkpoint.write(tmp_path / folder, TINY)
    first, second = ((tmp_path / f / "model.safetensors").read_bytes() for f in ("a", "b"))
    assert first == second
    assert not list(tmp_path.glob("*/*.partial"))


def test_a_structure_is_a_checkpoint_of_zeros_that_takes_no_place(tmp_path: Path) -> None:
    checkpoint.write(tmp_path / "drawn", TINY)
    checkpoint.write_structure(tmp_path / "zeros", TINY)
    drawn, zeros = (tmp_path / name / "model.safetensors" for name in ("drawn", "zeros"))
    assert zeros.stat().st_size == drawn.stat().st_size
    assert zeros.stat().st_blocks < drawn.stat().st_blocks
    model = convert(tmp_path / "zeros", tmp_path / "converted")
    assert not model.read_weight(model.stack[0].weights["embedding"]).any()


def test_a_fifth_of_the_real_model() -> None:
    def parameters(model: TinyModel) -> int:
        collected = checkpoint._Tensors({})
        draw(model, collected)
        return sum(math.prod(tensor.shape) for tensor in collected.tensors)

    assert parameters(checkpoint.FIFTH) == pytest.approx(2.1e9, rel=0.01)
    assert parameters(checkpoint.WHOLE) == pytest.approx(34.7e9, rel=0.01)
