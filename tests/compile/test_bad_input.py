"""`emberc convert` and `emberc build` refuse what they cannot use or write: with one line, exit
status 2, and nothing left behind."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from checkpoints import Tensors, TinyModel, tensors, write_checkpoint
from emberd.compile.build import build
from emberd.compile.cli import main
from emberd.compile.convert import convert
from emberd.daemon.artifact import Artifact
from rights import without_capabilities

TINY = TinyModel("refused", layers="DA", experts=32)  # its artifact: 8 MB in f32
NORM = "model.layers.1.input_layernorm.weight"
GATE = "model.layers.1.mlp.gate.weight"

commands = pytest.mark.parametrize("command", ["convert", "build"])


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Temporary files have a place of their own, which must be empty again in the end."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield
    assert list(folder.iterdir()) == []


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "source", TINY)


def _fails(command: str, source: Path, output: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The error of a command that leaves every folder around it as it was."""
    around = source.parent.parent
    before = sorted(around.rglob("*"))
    recipe = ["--recipe", "f32"] if command == "build" else []
    assert main([command, str(source), "-o", str(output), *recipe]) == 2
    assert sorted(around.rglob("*")) == before
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert printed.err.startswith("emberc: error: ")
    return printed.err


def _without(weights: Tensors) -> None:
    del weights[GATE]


def _with_another(weights: Tensors) -> None:
    weights["model.layers.1.mlp.gate.bias"] = np.zeros(TINY.experts, np.float32)


def _of_other_shape(weights: Tensors) -> None:
    weights[GATE] = weights[GATE].T.copy()


def _with_a_nan(weights: Tensors) -> None:
    weights[GATE][3, 5] = np.nan


def _with_a_huge_norm(weights: Tensors) -> None:
    weights[NORM][3] = 3e38


@commands
@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (_without, GATE),
        (_with_another, "model.layers.1.mlp.gate.bias"),
        (_of_other_shape, GATE),
        (_with_a_nan, f"tensor {GATE} holds a NaN at [3, 5]"),
        (_with_a_huge_norm, f"tensor {NORM} holds 3e+38 at [3]"),
    ],
)
def test_wrong_tensors(
    tmp_path: Path,
    command: str,
    damage: Callable[[Tensors], None],
    named: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    weights = tensors(TINY)
    damage(weights)
    source = write_checkpoint(tmp_path / "source", TINY, weights)
    assert named in _fails(command, source, tmp_path / "output", capsys)


@commands
def test_truncated_shards(
    source: Path, tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = source / "model.safetensors"
    os.truncate(file, file.stat().st_size - 1000)
    assert "truncated" in _fails(command, source, tmp_path / "output", capsys)


@commands
def test_unknown_architecture(
    source: Path, tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((source / "config.json").read_text())
    config |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (source / "config.json").write_text(json.dumps(config))
    assert "llama" in _fails(command, source, tmp_path / "output", capsys).lower()


@commands
def test_no_checkpoint(tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    missing = tmp_path / "missing"
    assert str(missing) in _fails(command, missing, tmp_path / "output", capsys)


@commands
def test_a_folder_that_may_not_be_written(
    source: Path, tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555)
    with without_capabilities():
        assert "Permission denied" in _fails(command, source, locked / "output", capsys)


@commands
@pytest.mark.parametrize("kind", ["below_a_file", "file", "folder", "dangling_link"])
def test_places_that_are_taken(
    source: Path, tmp_path: Path, command: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "taken"
    if kind == "folder":
        output.mkdir()
        (output / "something").touch()
    elif kind == "dangling_link":
        output.symlink_to(tmp_path / "nowhere")
    else:
        output.write_text("in the way")
    place = output / "below" if kind == "below_a_file" else output
    assert str(place) in _fails(command, source, place, capsys)


@pytest.fixture(params=["file_system", "file_size"])
def full(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A folder with room for an artifact's small files, but not for its weights."""
    folder = tmp_path / "full"
    folder.mkdir()
    with ExitStack() as stack:
        if request.param == "file_system":
            mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)]
            if subprocess.run(mount, capture_output=True, check=False).returncode:
                pytest.skip("needs the right to mount a file system")
            stack.callback(subprocess.run, ["umount", str(folder)], check=True)
        else:
            limits = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
            stack.callback(resource.setrlimit, resource.RLIMIT_FSIZE, limits)
        yield folder


def test_no_room_for_the_artifact(
    source: Path, full: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = _fails("build", source, full / "artifact", capsys)
    assert f"cannot write {full}" in error
    assert any(os.strerror(code) in error for code in (errno.EFBIG, errno.ENOSPC))


def test_no_room_for_temporary_files(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    assert "No such file" in _fails("build", source, tmp_path / "artifact", capsys)
    monkeypatch.undo()


def test_weights_that_became_wrong_after_the_conversion(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    convert(source, tmp_path / "converted")
    weights = tensors(TINY)
    _with_a_nan(weights)
    write_checkpoint(source, TINY, weights)
    error = _fails("build", tmp_path / "converted", tmp_path / "artifact", capsys)
    assert f"{GATE}: " in error and "not finite" in error


def test_a_killed_build_leaves_no_artifact_and_the_next_one_tidies_up(
    source: Path, tmp_path: Path
) -> None:
    output = tmp_path / "built" / "artifact"
    program = "from emberd.compile.cli import main; main()"
    command = [sys.executable, "-c", program, "build", str(source), "-o", str(output)]
    environment = {**os.environ, "TMPDIR": str(tmp_path / "built")}
    output.parent.mkdir()
    with subprocess.Popen(command, env=environment) as process:
        while not list(output.parent.glob(".artifact.*.partial/program.msgpack")):
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    assert not output.exists()
    build(source, output, "host", "f32", chunk_sizes=(1,))
    Artifact.open(output).verify_weights()
    assert not list(output.parent.glob(".artifact.*"))
