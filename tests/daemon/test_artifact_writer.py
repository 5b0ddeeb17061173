"""Artifacts are written complete or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from emberd.daemon import artifact_writer as writer_module
from emberd.daemon.artifact import Artifact
from emberd.daemon.artifact_writer import ArtifactWriter
from emberd.daemon.errors import EmberdError
from small_artifact import DESCRIPTION, PROGRAM, write


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "model")


def everything(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_equal_input_gives_equal_bytes(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a"), write(tmp_path / "b")
    assert everything(first) == everything(second)
    assert Artifact.open(first).digest == Artifact.open(second).digest


@pytest.mark.parametrize("exchange", [True, False])
def test_an_artifact_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool
) -> None:
    if not exchange:
        monkeypatch.setattr(writer_module, "_exchange", lambda a, b: False)
    path = write(tmp_path / "model", {"old": []})
    write(path, {"new": []})
    assert Artifact.open(path).kernels.isa == "new"
    assert not (path / "kernels-old.so").exists()
    assert os.listdir(tmp_path) == ["model"]  # noqa: PTH208


def test_an_empty_folder_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    Artifact.open(write(tmp_path / "model"))


@pytest.mark.parametrize("kind", ["file", "folder", "link", "other manifest"])
def test_anything_else_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "target"
    if kind == "file":
        path.write_text("mine")
    elif kind == "link":
        path.symlink_to(write(tmp_path / "model"))
    else:
        path.mkdir()
        (path / ("mine.txt" if kind == "folder" else "manifest.json")).write_text("{}")
    before = everything(tmp_path)
    with pytest.raises(EmberdError, match="exists and is not an artifact"):
        write(path)
    assert everything(tmp_path) == before


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, EmberdError])
def test_an_exception_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    with (
        pytest.raises(error),
        ArtifactWriter(tmp_path / "model", DESCRIPTION, target="x") as writer,
        writer.open_file("weights.bin") as file,
    ):
        file.write(b"half of it")
        raise error
    assert list(tmp_path.iterdir()) == []


def test_an_exception_leaves_the_old_artifact(path: Path) -> None:
    before = everything(path.parent)
    with (
        pytest.raises(RuntimeError),
        ArtifactWriter(path, DESCRIPTION, target="x") as writer,
    ):
        writer.write_program(PROGRAM)
        raise RuntimeError
    assert everything(path.parent) == before


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    for name in (".model.killed.partial", ".another.killed.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights.bin").write_text("half of it")
    write(tmp_path / "model")
    assert {file.name for file in tmp_path.iterdir()} == {"model", ".another.killed.partial"}


def test_what_another_process_is_writing_is_left_alone(tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError),
        ArtifactWriter(tmp_path / "model", DESCRIPTION, target="x") as writer,
    ):
        writer.write_program(PROGRAM)
        before = everything(tmp_path)
        write(tmp_path / "model")
        assert before.items() <= everything(tmp_path).items()
        raise RuntimeError
    assert [file.name for file in tmp_path.iterdir()] == ["model"]


def test_an_incomplete_artifact_is_a_mistake_of_the_caller(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match=r"no weights\.bin, experts\.bin"),
        ArtifactWriter(tmp_path / "model", DESCRIPTION, target="x") as writer,
    ):
        writer.write_program(PROGRAM)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(EmberdError, match=r"cannot write .*: No space left on device"):
        write(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_parent_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EmberdError, match="cannot write"):
        write(tmp_path / "file" / "model")


@pytest.mark.parametrize("name", ["../x", "/etc/x", ".hidden", "", "a\0b"])
def test_file_names_are_plain(tmp_path: Path, name: str) -> None:
    with (
        pytest.raises(EmberdError, match="not a plain file name"),
        ArtifactWriter(tmp_path / "other", DESCRIPTION, target="x") as writer,
    ):
        writer.write_file(name, b"")
