"""How fast this machine multiplies bytes: the roof over the multiplications of a prompt."""

from __future__ import annotations

import ctypes
import os
import subprocess
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from emberd.compile.isa.isa import host_isas

_SOURCE = Path(__file__).with_suffix(".c")
_FLAGS = ("-O2", "-mavx512f", "-mavx512vnni", "-shared", "-fPIC")
_INSTRUCTIONS, _PRODUCTS = 16, 64  # of a round; of an instruction
_ROUNDS = 2_000_000  # some 10 ms
TRIES = 5


def has_vnni() -> bool:
    """Whether this machine has the instruction that the peak is of."""
    return any(isa.name == "avx512vnni" for isa in host_isas())


class VnniPeak:
    """vpdpbusd on registers, by `threads` threads; `measure` as often as wanted.

    The best of a few tries, as new threads may have to share a core at first. Raises
    CalledProcessError or OSError when there is no working C compiler.
    """

    def __init__(self) -> None:
        with TemporaryDirectory() as folder:
            library = Path(folder) / "peak.so"
            compiler = os.environ.get("CC", "cc")
            subprocess.run([compiler, *_FLAGS, "-o", library, _SOURCE], check=True)
            self._multiply = ctypes.CDLL(str(library)).ember_multiply
        self._multiply.argtypes = [ctypes.c_long]

    def measure(self, threads: int, rounds: int = _ROUNDS) -> float:
        """Operations per second: a product and its addition are two."""
        operations = 2 * threads * rounds * _INSTRUCTIONS * _PRODUCTS
        return operations / min(self._seconds(threads, rounds) for _ in range(TRIES))

    def _seconds(self, threads: int, rounds: int) -> float:
        others = [
            threading.Thread(target=self._multiply, args=(rounds,)) for _ in range(1, threads)
        ]
        start = time.perf_counter()
        for thread in others:
            thread.start()
        self._multiply(rounds)
        for thread in others:
            thread.join()
        return time.perf_counter() - start
