"""How fast this machine reads memory: the roofline that decoding is held against."""

from __future__ import annotations

import mmap
import threading
import time

import numpy as np

_BYTES = 512 << 20  # far more than any cache holds


class MemoryRead:
    """A stream read of 512 MiB by `threads` threads; `measure` as often as wanted.

    The memory is private and in huge pages where the system gives them, so that neither files nor
    the translation of addresses limit the stream. A bitwise or over 64-bit words needs so little
    arithmetic that numpy's loop waits for memory all the time.
    """

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._words = np.frombuffer(self._memory, np.uint64)
        self._words[:] = 1  # pages that were never written are all the same one

    def measure(self, threads: int) -> float:
        """Bytes per second of one pass."""
        parts = np.array_split(self._words, threads)
        others = [threading.Thread(target=np.bitwise_or.reduce, args=(part,)) for part in parts[1:]]
        start = time.perf_counter()
        for thread in others:
            thread.start()
        np.bitwise_or.reduce(parts[0])
        for thread in others:
            thread.join()
        return _BYTES / (time.perf_counter() - start)
