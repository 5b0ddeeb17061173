"""An artifact's text files are checked when it is built, not first on the device."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from emberd.compile.build import build
from emberd.compile.texts import text_files
from emberd.daemon.errors import EmberdError
from needs import needs

DEMO = Path(__file__).parents[2] / "firmware_assets" / "demo" / "model"


def test_the_tokenizer_is_compiled_and_the_rest_copied() -> None:
    files = text_files(DEMO)
    assert set(files) == {
        "vocabulary.msgpack",
        "tokenizer_config.json",
        "generation_config.json",
        "chat_template.jinja",
    }
    for name in set(files) - {"vocabulary.msgpack"}:
        assert files[name] == (DEMO / name).read_bytes()


def test_a_model_without_any(tmp_path: Path) -> None:
    assert text_files(tmp_path) == {}


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("chat_template.jinja", b"{% for %}", "chat template: "),
        ("chat_template.jinja", b"\xff", "chat_template.jinja: not UTF-8"),
        ("tokenizer.json", b"{}", "tokenizer.json: not a tokenizer file"),
        ("tokenizer.json", b"\xff", "tokenizer.json: not UTF-8"),
    ],
)
def test_files_that_make_no_sense_are_found_by_the_build(
    tmp_path: Path, name: str, data: bytes, reason: str
) -> None:
    needs("tvm")
    source = Path(shutil.copytree(DEMO, tmp_path / "model"))
    (source / name).write_bytes(data)
    with pytest.raises(EmberdError, match=reason):
        build(source, tmp_path / "artifact", "host", "q4")
    assert not (tmp_path / "artifact").exists()
