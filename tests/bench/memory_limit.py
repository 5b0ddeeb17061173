"""A hard limit of memory for a process and what it reads from files: a cgroup of its own."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from pathlib import Path
from types import TracebackType

_ROOT = Path("/sys/fs/cgroup")
_PATIENCE_SECONDS = 5.0


class MemoryLimitError(Exception):
    """This machine or user cannot limit memory."""


class MemoryLimit:
    """At most `limit` bytes for the processes in it, the file pages that they brought in included.

    Raises MemoryLimitError where cgroups cannot be made: that takes root, or a delegated one.
    """

    def __init__(self, limit: int) -> None:
        legacy = _ROOT / "memory"
        parent = legacy if legacy.is_dir() else _ROOT
        name = "memory.limit_in_bytes" if legacy.is_dir() else "memory.max"
        try:
            self._folder = Path(tempfile.mkdtemp(prefix="emberd-bench-", dir=parent))
        except OSError as error:
            raise MemoryLimitError(_cannot(error)) from None
        try:
            (self._folder / name).write_text(str(limit))
            swap = self._folder / "memory.swap.max"
            if swap.exists():
                swap.write_text("0")
        except OSError as error:
            self.close()
            raise MemoryLimitError(_cannot(error)) from None

    def add(self, process: int) -> None:
        """Puts a process in."""
        (self._folder / "cgroup.procs").write_text(str(process))

    def close(self) -> None:
        """Removes the limit; its processes have ended."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while self._folder.exists():
            try:
                self._folder.rmdir()
            except OSError:  # the last process is still being cleared away
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)

    def __enter__(self) -> MemoryLimit:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _cannot(error: OSError) -> str:
    return f"cannot limit memory with a cgroup ({error.strerror}): this takes root"


def find_memory(size: int) -> None:
    """Has so many bytes taken and given back at once, so that what runs next finds them free.

    The host of a virtual machine takes memory away that was free for seconds; to get it back costs
    more than to read as much from a disk, and would be measured instead."""
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        for page in range(0, size, mmap.PAGESIZE):
            memory[page] = 1


def forget(path: Path) -> None:
    """Drops the pages of a file, or of those in a folder, from the page cache."""
    for file in [path] if path.is_file() else path.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
