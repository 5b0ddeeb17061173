"""Files that appear under their names complete or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from emberd.daemon.errors import EmberdError


def write_whole(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Has `write` fill a file that then takes the name `path`, in place of a file that has it.

    Raises EmberdError when that cannot be done; what was there is then as before.
    """
    path = path.resolve()
    if path.exists() and not path.is_file():
        raise EmberdError(f"cannot write {path}: it is there and is no regular file")
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        try:
            with partial.open("wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise EmberdError(f"cannot write {path}: {error.strerror or error}") from error
