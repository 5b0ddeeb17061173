"""`emberc run`: token ids in, logits out, on both backends."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import TinyModel, write_checkpoint
from emberd.compile.build import build
from emberd.compile.cli import main
from emberd.compile.convert import convert
from emberd.compile.converted import ConvertedModel
from emberd.compile.oracle import Oracle

TINY = TinyModel("run", layers="DA", hidden=36, vocab=50, experts=2, top_k=2)
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 49, 0]
BACKENDS = {"artifact": "core", "converted": "onnxruntime"}

both = pytest.mark.parametrize("model", BACKENDS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """converted, artifact, and tokens.json."""
    folder = tmp_path_factory.mktemp("run")
    convert(write_checkpoint(folder / "checkpoint", TINY), folder / "converted")
    build(folder / "converted", folder / "artifact", "host", "f32", chunk_sizes=(1, 8))
    (folder / "tokens.json").write_text(json.dumps(TOKENS))
    return folder


def _run(model: Path, tokens: Path, *arguments: str | Path) -> int:
    return main(["run", str(model), "--tokens", str(tokens), *map(str, arguments)])


def _error(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a failed command printed."""
    output = capsys.readouterr()
    assert output.out == "" and output.err.count("\n") == 1
    assert output.err.startswith("emberc: error: ")
    return output.err


@both
@pytest.mark.parametrize("named", [False, True])
def test_logits_of_every_position_are_written(
    folder: Path, model: str, named: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    backend = ["--backend", BACKENDS[model]] if named else []
    file = tmp_path / "logits.npy"
    assert _run(folder / model, folder / "tokens.json", "--logits", file, *backend) == 0
    expected = Oracle(ConvertedModel.load(folder / "converted")).session().step(TOKENS)
    logits = np.load(file)
    assert logits.dtype == np.float32 and logits.shape == (len(TOKENS), TINY.vocab)
    assert np.abs(logits - expected).max() <= 1e-3 * expected.std()
    best = expected[-1].argmax()
    assert capsys.readouterr().out.startswith(f"{len(TOKENS)} tokens; most likely next: {best} ")
    assert list(tmp_path.iterdir()) == [file]


@both
def test_the_wrong_backend_is_refused(
    folder: Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (other,) = set(BACKENDS.values()) - {BACKENDS[model]}
    assert _run(folder / model, folder / "tokens.json", "--backend", other) == 2
    assert f"runs on {BACKENDS[model]}, not on {other}" in _error(capsys)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"1, 2, 3",
        b"[1, 2",
        b"\xff\xfe",
        b"[" * 100_000,
        b"{}",
        b"17",
        b"[]",
        b"[1, 2.5]",
        b"[true]",
        b'["1"]',
        b"[[1]]",
        b"[null]",
        b"[NaN]",
        b"[" + b"9" * 5000 + b"]",
    ],
    ids=lambda content: content[:12].decode(errors="replace"),
)
def test_other_content_than_token_ids_is_refused(
    folder: Path, tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tokens.json").write_bytes(content)
    assert _run(folder / "artifact", tmp_path / "tokens.json") == 2
    assert f"{tmp_path / 'tokens.json'}: " in _error(capsys)


def test_a_missing_file_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(folder / "artifact", folder / "none.json") == 2
    assert f"{folder / 'none.json'}: not a JSON file" in _error(capsys)


def test_a_list_in_place_of_its_file_is_explained(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(folder / "artifact", Path("[1,2,3]")) == 2
    assert "[1,2,3]: not a JSON file of token ids, with a list such as [1, 2, 3]" in _error(capsys)


@pytest.mark.parametrize(
    ("kind", "command"),
    [
        *(("artifact", command) for command in ("inspect", "plan", "build", "convert")),
        *(("converted", command) for command in ("inspect", "convert")),
    ],
)
def test_folders_of_another_kind_are_told(
    folder: Path, tmp_path: Path, kind: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    more = {"plan": ["--memory", "1G"], "inspect": []}.get(command, ["-o", str(tmp_path / "out")])
    assert main([command, str(folder / kind), *more]) == 2
    told = {
        "artifact": "it is an artifact, already",
        "converted": "it is a converted model: emberc",
    }
    assert told[kind] in _error(capsys)


def test_an_artifact_is_no_converted_model(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    artifact = str(folder / "artifact")
    assert main(["verify", artifact, "--against", artifact]) == 2
    assert "(no model.yaml); it is an artifact" in _error(capsys)


@both
@pytest.mark.parametrize("tokens", [[1, 50], [-1], [2**31], [2**63], [-(2**70)]])
def test_tokens_outside_the_vocabulary_are_refused(
    folder: Path, tmp_path: Path, model: str, tokens: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tokens.json").write_text(json.dumps(tokens))
    assert _run(folder / model, tmp_path / "tokens.json") == 2
    assert "token" in _error(capsys)


@both
def test_more_tokens_than_the_context_are_refused(
    folder: Path, tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tokens.json").write_text(json.dumps([1] * 4097))
    assert _run(folder / model, tmp_path / "tokens.json") == 2
    assert "4096" in _error(capsys)


def test_what_is_no_model_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(folder / "checkpoint", folder / "tokens.json") == 2
    assert "is not an artifact" in _error(capsys)


@pytest.mark.parametrize("place", ["missing/logits.npy", "file/logits.npy", "folder"])
def test_a_place_that_cannot_be_written_is_refused(
    folder: Path, tmp_path: Path, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    before = sorted(tmp_path.rglob("*"))
    arguments = ["--logits", tmp_path / place]
    assert _run(folder / "artifact", folder / "tokens.json", *arguments) == 2
    assert f"cannot write {tmp_path / place}: " in _error(capsys)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_full_disk_leaves_what_was_there(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "logits.npy").write_bytes(b"before")
    monkeypatch.setattr(np.lib.format, "write_array", _fill_the_disk)
    arguments = ["--logits", tmp_path / "logits.npy"]
    assert _run(folder / "artifact", folder / "tokens.json", *arguments) == 2
    assert os.strerror(28) in _error(capsys)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"before"]


def _fill_the_disk(file: Any, _array: np.ndarray) -> None:
    with Path("/dev/full").open("wb", buffering=0) as full:
        file.write(b"half")
        full.write(b"more")


def test_what_is_no_regular_file_is_not_replaced(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fifo, link, behind = tmp_path / "fifo", tmp_path / "link", tmp_path / "behind"
    os.mkfifo(fifo)
    assert _run(folder / "artifact", folder / "tokens.json", "--logits", fifo) == 2
    assert "no regular file" in _error(capsys)
    assert fifo.is_fifo()
    link.symlink_to(behind)
    assert _run(folder / "artifact", folder / "tokens.json", "--logits", link) == 0
    assert link.is_symlink() and np.load(behind).shape == (len(TOKENS), TINY.vocab)


def test_logits_that_are_not_finite_are_an_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    logits = np.zeros((len(TOKENS), TINY.vocab), np.float32)
    logits[7, 3] = np.nan
    monkeypatch.setattr("emberd.compile.run.core_logits", lambda *_: logits)
    assert _run(folder / "artifact", folder / "tokens.json") == 2
    assert "position 7 are not finite" in _error(capsys)
