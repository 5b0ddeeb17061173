"""Both sides measured in turns, each sample only on a quiet machine."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from emberd.compile.bandwidth import MemoryRead

from bench.quiet import FOREIGN_LIMIT, ForeignLoad, wait_until_quiet
from bench.worker import SIDES, Reply, Worker

SAMPLES = 5
PROMPT = 16  # tokens before the first one
_READS = 8  # passes over memory after each pair of samples
_TRIES = 3  # for one sample; then the least disturbed of them is taken
_PATIENCE_SECONDS = 20.0
_START_SECONDS = 120.0  # that loading may take
_SLOWEST = {"decode": 4.0, "prefill": 10.0, "fill": 10.0}  # tokens a second that are waited for
_SPARE_SECONDS = 10.0


@dataclass
class Samples:
    """Values of each side in the order taken, and of memory read between them (bytes/s)."""

    values: dict[str, list[float]] = field(default_factory=lambda: {side: [] for side in SIDES})
    reads: list[float] = field(default_factory=list)


class Bench:
    """Measures the model in `paths`, a file or folder for each side.

    `foreign`: the most that others used of the machine, in cores, during any sample taken.
    """

    def __init__(self, paths: dict[str, Path]) -> None:
        self.foreign = 0.0
        self._paths = paths
        self._read = MemoryRead()

    @contextmanager
    def workers(self, threads: int, context: int, streams: int = 1) -> Iterator[list[Worker]]:
        """Fresh processes of both sides, loaded."""
        workers = [Worker(side) for side in SIDES]
        try:
            for worker in workers:
                self._start(worker, threads, context, streams)
            yield workers
        finally:
            for worker in workers:
                worker.close()

    def rates(
        self,
        workers: list[Worker],
        threads: int,
        method: str,
        count: int,
        *,
        streams: int = 1,
        prepare: Callable[[Worker], object] = lambda worker: None,
    ) -> Samples:
        """Tokens per second of `method`, `count` tokens in each of `streams`."""
        samples = Samples()
        for _ in range(SAMPLES):
            for worker in workers:
                reply = self._quietly(worker, method, count, streams, prepare)
                samples.values[worker.side].append(count * streams / reply.seconds)
            samples.reads += [self._read.measure(threads) for _ in range(_READS)]
        return samples

    def starts(
        self, threads: int, context: int, then: Callable[[Worker], Reply]
    ) -> tuple[Samples, Samples]:
        """Of fresh processes: seconds from load to the first token, and peak bytes after `then`."""
        seconds, peaks = Samples(), Samples()
        for _ in range(SAMPLES):
            for side in SIDES:
                with Worker(side) as worker:
                    reply = self._start(worker, threads, context)
                    seconds.values[side].append(reply.seconds)
                    peaks.values[side].append(then(worker).peak_bytes)
        return seconds, peaks

    def _start(self, worker: Worker, threads: int, context: int, streams: int = 1) -> Reply:
        wait_until_quiet(_PATIENCE_SECONDS)
        load = ForeignLoad()
        path = str(self._paths[worker.side])
        reply = worker.call(
            "start",
            _START_SECONDS,
            path=path,
            threads=threads,
            context=context,
            streams=streams,
            prompt=PROMPT,
        )
        self.foreign = max(self.foreign, load.cores(reply.cpu_seconds))
        return reply

    def _quietly(
        self,
        worker: Worker,
        method: str,
        count: int,
        streams: int,
        prepare: Callable[[Worker], object],
    ) -> Reply:
        """The least disturbed of a few samples; the first that nobody disturbed is enough."""
        foreign, best = math.inf, None
        for _ in range(_TRIES):
            prepare(worker)
            wait_until_quiet(_PATIENCE_SECONDS)
            load = ForeignLoad()
            reply = timed(worker, method, count, streams)
            cores = load.cores(reply.cpu_seconds)
            if cores < foreign:
                foreign, best = cores, reply
            if foreign <= FOREIGN_LIMIT:
                break
            note(f"  disturbed: others used {cores:.2f} cores")
        assert best is not None
        self.foreign = max(self.foreign, foreign)
        return best


def timed(worker: Worker, method: str, count: int, streams: int = 1) -> Reply:
    """`method` of `count` tokens; a side that is absurdly slow fails with WorkerError."""
    limit = count * streams / _SLOWEST[method] + _SPARE_SECONDS
    return worker.call(method, limit, count=count)


def note(text: str) -> None:
    """Tells whoever waits how far the run is."""
    print(text, file=sys.stderr, flush=True)
