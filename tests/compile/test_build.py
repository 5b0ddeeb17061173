"""What a build leaves behind, and what it refuses to build."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from checkpoints import MODELS, TinyModel, write_checkpoint
from emberd.compile.build import build
from emberd.compile.cli import main
from emberd.compile.convert import convert
from emberd.daemon.errors import EmberdError

CHUNKS = (1, 8)


def _converted(model: TinyModel, folder: Path) -> Path:
    write_checkpoint(folder / "checkpoint", model)
    convert(folder / "checkpoint", folder / "converted", name=model.name)
    return folder / "converted"


def test_two_builds_are_byte_identical(tmp_path: Path) -> None:
    """Whatever a process has built before."""
    converted = _converted(MODELS[0], tmp_path)
    build(converted, tmp_path / "first", "host", "q4", chunk_sizes=CHUNKS)
    arguments = (converted, tmp_path / "second", "host", "q4")
    program = (
        "from pathlib import PosixPath; from emberd.compile.build import build\n"
        f"build(*{arguments}, chunk_sizes={CHUNKS})"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    for file in sorted((tmp_path / "first").iterdir()):
        assert file.read_bytes() == (tmp_path / "second" / file.name).read_bytes(), file.name


def test_passes_report_the_fusion_of_every_expert_mixture(tmp_path: Path) -> None:
    converted = _converted(MODELS[0], tmp_path)
    report = build(converted, tmp_path / "artifact", "host", "q4", chunk_sizes=CHUNKS)
    fused = [line for line in report if "moa_fusion" in line]
    weights = "router, experts_gate_up, experts_down"
    assert fused == [f"moe x 4: moa_fusion: 1 x mixture of experts ({weights})"]


def test_dump_writes_the_ir_after_each_phase(tmp_path: Path) -> None:
    converted = _converted(MODELS[0], tmp_path)
    build(converted, tmp_path / "artifact", "host", "f32", tmp_path / "ir", chunk_sizes=(1,))
    names = sorted(file.name for file in (tmp_path / "ir" / "moe-t1").iterdir())
    assert names[0] == "01-import_onnx.py"
    assert names[-1].endswith("plan_memory.py")
    text = (tmp_path / "ir" / "moe-t1" / names[-1]).read_text()
    assert "acquire_experts" in text and "moe_f32" in text


def test_a_dimension_that_the_recipe_cannot_take_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = replace(MODELS[0], name="narrow_experts", intermediate=48)
    converted = _converted(model, tmp_path)
    status = main(["build", str(converted), "-o", str(tmp_path / "artifact"), "--recipe", "q4"])
    assert status == 2
    assert "multiple of 32" in capsys.readouterr().err
    assert not (tmp_path / "artifact").exists()


def test_an_unknown_target_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(EmberdError, match=r"unknown target 'toaster'.*x86-64"):
        build(tmp_path, tmp_path / "artifact", "toaster", "q4")
