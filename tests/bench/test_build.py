"""That packing and compiling are timed, of the real model's dimensions too."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from checkpoints import TinyModel, write_checkpoint
from emberd.compile.convert import convert

from bench import build

TINY = TinyModel("build", layers="DA", hidden=64, vocab=64, dtype="BF16")


@pytest.mark.parametrize("format", ["q8", "q4"])
def test_packing_by_one_core(tmp_path: Path, format: str) -> None:
    write_checkpoint(tmp_path / "checkpoint", TINY)
    model = convert(tmp_path / "checkpoint", tmp_path / "converted")
    before = os.sched_getaffinity(0)
    found = build.packing(model, format, experts=2, rounds=3)
    assert os.sched_getaffinity(0) == before
    assert len(found.packed) == len(found.read) == 3
    assert min(found.packed + found.read) > 0


def test_compiling_a_structure() -> None:
    seconds = build.compiling(TINY, ["generic"], [1])
    assert list(seconds) == ["programs", "kernels for generic"]
    assert min(seconds.values()) > 0


def test_the_table() -> None:
    packed = {"q4": build.Packing([4e8, 6e8, 5e8], [1e9])}
    lines = build.table(packed, {"programs": 20.0, "kernels for avx2": 30.0}).splitlines()
    assert lines[2:] == [
        "| packing q4, MB/s of bfloat16 a core (reading alone: 1000) | 500 (600) | ≥ 300 |",
        "| programs, s | 20.0 | |",
        "| kernels for avx2, s | 30.0 | |",
        "| all of these, s | 50.0 | ≤ 120 |",
    ]
