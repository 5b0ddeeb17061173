"""Memory that the core writes to."""

from __future__ import annotations

import ctypes
import mmap

from emberd.daemon.errors import EmberdError


def anonymous_memory(size: int, what: str) -> mmap.mmap:
    """Zeroed memory that is taken page by page as it is written, and given back when it is freed:
    of a heap, the C library would keep it."""
    try:
        return mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise EmberdError(f"cannot reserve {size} bytes for {what}: {error}") from None


def address(memory: mmap.mmap) -> int:
    """Where the bytes of `memory` are; valid while it is alive and keeps its size."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
