"""What a parallel region costs, and what is left when another process takes a core.

    python -m bench.pool --threads 2

launch   an empty region while the workers are awake: all that a kernel pays for its threads; and
         the first one after they went to sleep
region   of about as much work as a kernel's: alone, and while another process keeps a core busy;
         beside one thread alone, which a pool that waited for its lost worker would fall behind
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

_SOURCE = Path(__file__).with_suffix(".c")
_CORE = Path(__file__).parents[2] / "daemon" / "native"
_ASLEEP_SECONDS = 0.01  # more than an idle worker spins
_TASKS = 64  # of a region with work
_STEPS = 8000  # of each: some 150 us a region
_ERROR_BYTES = 4096

LAUNCH_MUST = 1.0  # microseconds


class Pool:
    """The daemon's pool with `threads` threads. Close it when done.

    Raises CalledProcessError or OSError when there is no working C compiler.
    """

    def __init__(self, threads: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            library = Path(folder) / "pool.so"
            sources = [_SOURCE, *sorted(_CORE.glob("*.c"))]
            flags = ("-std=gnu11", "-O2", "-shared", "-fPIC", "-pthread", f"-I{_CORE}")
            compiler = os.environ.get("CC", "cc")
            command = [compiler, *flags, "-o", library, *sources, "-ldl", "-lm"]
            subprocess.run(command, check=True)
            self._library = ctypes.CDLL(str(library))
        self._library.ember_pool_open.restype = ctypes.c_void_p
        error = ctypes.create_string_buffer(_ERROR_BYTES)
        self._pool = ctypes.c_void_p(self._library.ember_pool_open(threads, None, 0, error))
        if not self._pool:
            raise RuntimeError(error.value.decode())

    def regions(self, tasks: int, steps: int, count: int) -> list[float]:
        """Microseconds that each of `count` regions took, one after the other."""
        taken = (ctypes.c_int64 * count)()
        status = self._library.bench_regions(self._pool, tasks, ctypes.c_int64(steps), count, taken)
        if status != 0:
            raise RuntimeError("a region failed")
        return [nanoseconds / 1000 for nanoseconds in taken]

    def close(self) -> None:
        self._library.ember_pool_close(self._pool)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


@dataclass
class Costs:
    """Microseconds: of empty regions, each; of regions with work, the mean of each round."""

    awake: list[float] = field(default_factory=list)
    asleep: list[float] = field(default_factory=list)
    single: list[float] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)
    disturbed: list[float] = field(default_factory=list)


def measure(threads: int, rounds: int, count: int) -> Costs:
    """In turns: `count` regions of each kind in each of `rounds`."""
    found = Costs()
    with Pool(threads) as pool, Pool(1) as single, _other_process() as other:
        for _ in range(rounds):
            pool.regions(threads, 0, count)  # which wakes the workers
            found.awake += pool.regions(threads, 0, count)
            time.sleep(_ASLEEP_SECONDS)
            found.asleep += pool.regions(threads, 0, 1)
            found.single.append(statistics.mean(single.regions(_TASKS, _STEPS, count)))
            found.alone.append(statistics.mean(pool.regions(_TASKS, _STEPS, count)))
            other.send_signal(signal.SIGCONT)
            found.disturbed.append(statistics.mean(pool.regions(_TASKS, _STEPS, count)))
            other.send_signal(signal.SIGSTOP)
    return found


@contextmanager
def _other_process() -> Iterator[subprocess.Popen[bytes]]:
    """One that keeps a core busy, once it is told to continue."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        process.send_signal(signal.SIGSTOP)
        try:
            yield process
        finally:
            process.kill()


def table(found: Costs, threads: int) -> str:
    """Markdown: medians, the least in brackets, in microseconds."""
    kinds = [
        ("launch, workers awake", found.awake, f"< {LAUNCH_MUST:g}"),
        ("launch, workers asleep", found.asleep, ""),
        ("region, 1 thread", found.single, ""),
        (f"region, {threads} threads", found.alone, ""),
        (f"region, {threads} threads, a core taken", found.disturbed, "≤ 1 thread"),
    ]
    lines = ["| figure | us | must |", "|---|---|---|"]
    for name, values, must in kinds:
        lines.append(f"| {name} | {statistics.median(values):.3g} ({min(values):.3g}) | {must} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.pool", description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    threads = parser.parse_args().threads
    print(table(measure(threads, rounds=20, count=1000), threads))


if __name__ == "__main__":
    main()
