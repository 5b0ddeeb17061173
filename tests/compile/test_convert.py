"""A conversion appears complete or not at all, copies no weights and refuses bad ones."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import yaml
from checkpoints import TinyModel, tensors, write_checkpoint
from emberd.compile.convert import convert
from emberd.compile.converted import ConvertedModel
from emberd.daemon.errors import EmberdError
from rights import without_capabilities

TINY = TinyModel("converting", layers="DA", hidden=32, vocab=40, experts=3, shared=8)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "source", TINY)


def test_no_weights_are_copied(source: Path, tmp_path: Path) -> None:
    model = convert(source, tmp_path / "model", name="ember")
    size = sum(file.stat().st_size for file in model.folder.rglob("*") if file.is_file())
    assert model.name == "ember"
    assert size < (source / "model.safetensors").stat().st_size / 4
    assert not [file for file in tmp_path.iterdir() if "partial" in file.name]


def test_the_pair_can_be_moved(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "nested" / "model")
    (tmp_path / "other").mkdir()
    for name in ("source", "nested"):
        (tmp_path / name).rename(tmp_path / "other" / name)
    model = ConvertedModel.load(tmp_path / "other" / "nested" / "model")
    weight = model.read_weight(model.stack[-1].weights["final_norm"])
    np.testing.assert_array_equal(weight, tensors(TINY)["model.norm.weight"])


def test_relative_places_and_links(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """References follow links on both sides, so they hold from wherever the model is opened."""
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "deep" / "er")
    (tmp_path / "alias").symlink_to(source)
    monkeypatch.chdir(tmp_path)
    convert("alias", "link/model")
    monkeypatch.chdir(tmp_path / "deep")
    assert ConvertedModel.load("er/model").shards["model.safetensors"].path.is_file()


def test_text_files_come_along(source: Path, tmp_path: Path) -> None:
    added = {"added_tokens": [{"id": 7, "content": "<end>"}, {"id": 8, "content": "<other>"}]}
    (source / "tokenizer.json").write_text(json.dumps(added))
    (source / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    (source / "chat_template.jinja").write_text("{{ messages }}")
    model = convert(source, tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (model.folder / name).read_bytes() == (source / name).read_bytes()
    assert model.stop_tokens == (2, 1, 7)  # generation_config, config, tokenizer


def test_a_template_inside_the_tokenizer_configuration_is_written_out(
    source: Path, tmp_path: Path
) -> None:
    (source / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    model = convert(source, tmp_path / "model")
    assert (model.folder / "chat_template.jinja").read_text() == "{{ messages }}"


def test_a_stop_token_outside_the_vocabulary_is_refused(source: Path, tmp_path: Path) -> None:
    (source / "generation_config.json").write_text('{"eos_token_id": 40}')
    with pytest.raises(EmberdError, match=r"stop token 40 is outside the vocabulary \(0\.\.39\)"):
        convert(source, tmp_path / "model")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
def test_weights_that_are_not_finite_are_refused(tmp_path: Path, value: float, dtype: str) -> None:
    weights = tensors(TINY)
    weights["model.layers.1.mlp.experts.down_proj"][2, 5, 1] = value
    tiny = TinyModel(**{**vars(TINY), "dtype": dtype})
    source = write_checkpoint(tmp_path / "source", tiny, weights)
    with pytest.raises(EmberdError, match=r"model\.safetensors: tensor model\.layers\.1.*5, 1\]"):
        convert(source, tmp_path / "model")
    assert list(tmp_path.iterdir()) == [source]


def test_truncated_shards_are_refused(source: Path, tmp_path: Path) -> None:
    file = source / "model.safetensors"
    os.truncate(file, file.stat().st_size - 10)
    with pytest.raises(EmberdError, match=r"tensor lm_head\.weight ends at byte .* truncated"):
        convert(source, tmp_path / "model")


def test_existing_folders_are_left_alone(source: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    convert(source, tmp_path / "model")  # an empty folder is as good as none
    before = (tmp_path / "model" / "model.yaml").read_bytes()
    with pytest.raises(EmberdError, match="already exists; remove it or choose another place"):
        convert(source, tmp_path / "model", name="other")
    assert (tmp_path / "model" / "model.yaml").read_bytes() == before


@pytest.mark.parametrize("step", ["write_text", "write_bytes", "rename"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EIO])
def test_nothing_half_written_remains(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, code: int
) -> None:
    def fail(*_: Any, **__: Any) -> NoReturn:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Path, step, fail)
    with pytest.raises(EmberdError, match=f"model: cannot be written: {os.strerror(code)}"):
        convert(source, tmp_path / "model")
    assert list(tmp_path.iterdir()) == [source]


def test_what_killed_conversions_left_is_removed(source: Path, tmp_path: Path) -> None:
    killed = subprocess.Popen([sys.executable, "-c", ""])
    killed.wait()
    dead, alive = (
        tmp_path / f".converted.partial-{process}" for process in (killed.pid, os.getppid())
    )
    others = [tmp_path / ".converted.partial-x", tmp_path / f".other.partial-{killed.pid}"]
    for folder in (dead, alive, *others):
        (folder / "blocks").mkdir(parents=True)
    convert(source, tmp_path / "converted")
    assert not dead.exists()
    assert all(folder.exists() for folder in (alive, *others))


def test_an_interrupt_leaves_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any, **__: Any) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(yaml, "dump", interrupt)
    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "model")
    assert list(tmp_path.iterdir()) == [source]


def test_places_that_cannot_be_written_are_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(EmberdError, match=r"cannot be written: (Not a directory|File exists)"):
        convert(source, tmp_path / "file" / "model")


def test_a_read_only_folder_is_refused(source: Path, tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555)
    with without_capabilities(), pytest.raises(EmberdError, match="written: Permission denied"):
        convert(source, locked / "model")
    assert not list(locked.iterdir())


def test_every_weight_is_checked_once(source: Path, tmp_path: Path) -> None:
    seen: list[int] = []
    convert(source, tmp_path / "model", progress=seen.append)
    assert sum(seen) == 4 * sum(weight.size for weight in tensors(TINY).values())


def test_a_source_that_vanishes_is_an_error(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "model")
    shutil.rmtree(source)
    with pytest.raises(EmberdError, match="must stay where it was when it was converted"):
        ConvertedModel.load(tmp_path / "model")
