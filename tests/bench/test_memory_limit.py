"""A process within a limit cannot have more; what cannot be limited is said."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench import memory_limit
from bench.memory_limit import MemoryLimit, MemoryLimitError, forget

LIMIT = 64 << 20


def test_a_process_is_killed_beyond_its_limit() -> None:
    program = "input(); bytes = b'x' * int(input()); print(len(bytes), flush=True)"
    try:
        limit = MemoryLimit(LIMIT)
    except MemoryLimitError as error:
        pytest.skip(str(error))
    with limit:
        for size, survives in ((LIMIT // 4, True), (LIMIT * 2, False)):
            process = subprocess.Popen(
                [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            limit.add(process.pid)
            out, _ = process.communicate(f"\n{size}\n".encode())
            assert (process.returncode == 0) is survives
            assert out == (f"{size}\n".encode() if survives else b"")


def test_where_there_are_no_cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_limit, "_ROOT", tmp_path / "nothing")
    with pytest.raises(MemoryLimitError, match=r"cannot limit memory .* takes root"):
        MemoryLimit(LIMIT)


@pytest.mark.parametrize("what", ["file", "folder"])
def test_forgotten_files_keep_their_content(tmp_path: Path, what: str) -> None:
    (tmp_path / "data").write_bytes(b"x" * 10000)
    forget(tmp_path / "data" if what == "file" else tmp_path)
    assert (tmp_path / "data").read_bytes() == b"x" * 10000
