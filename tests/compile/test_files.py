"""Files appear whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import pytest
from emberd.compile.files import write_whole
from emberd.daemon.errors import EmberdError


def test_a_file_takes_the_place_of_another(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"before")
    write_whole(path, lambda file: file.write(b"after"))
    assert path.read_bytes() == b"after"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("raised", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_what_was_there_stays_when_writing_fails(tmp_path: Path, raised: BaseException) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"before")

    def write(file: BinaryIO) -> None:
        file.write(b"half")
        raise raised

    expected = EmberdError if isinstance(raised, OSError) else KeyboardInterrupt
    with pytest.raises(expected):
        write_whole(path, write)
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", [".", "nowhere/file"])
def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(EmberdError, match=f"cannot write {(tmp_path / name).resolve()}: "):
        write_whole(tmp_path / name, lambda file: file.write(b""))
