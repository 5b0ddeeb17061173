"""Both sides measured in turns, each sample only on a quiet machine."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from emberd.compile.bandwidth import MemoryRead

from bench.memory_limit import MemoryLimit, forget
from bench.quiet import FOREIGN_LIMIT, ForeignLoad, wait_until_quiet
from bench.worker import SIDES, Reply, Worker

SAMPLES = 5
PROMPT = 16  # tokens before the first one
_READS = 4  # passes over memory after each sample
_TRIES = 3  # for one sample; then the least disturbed of them is taken
PATIENCE_SECONDS = 20.0
_START_SECONDS = 120.0  # that loading may take
_SLOWEST = {"decode": 4.0, "prefill": 10.0, "fill": 10.0}  # tokens a second that are waited for
_SPARE_SECONDS = 10.0


@dataclass(frozen=True)
class Memory:
    """What a process may use, in bytes: `limit` in all, and `experts` of it for experts."""

    limit: int
    experts: int


@dataclass
class Samples:
    """Values of each side in the order taken, and of memory read between them (bytes/s)."""

    values: dict[str, list[float]] = field(default_factory=lambda: {side: [] for side in SIDES})
    reads: list[float] = field(default_factory=list)


@dataclass
class Starts:
    """Of fresh processes: seconds from starting the process, and from loading the model, to the
    first token; and the most bytes that were resident."""

    exec: Samples = field(default_factory=Samples)
    load: Samples = field(default_factory=Samples)
    peak: Samples = field(default_factory=Samples)


class Bench:
    """Measures the model in `paths`, a file or folder for each side.

    `foreign`: the most that others used of the machine, in cores, during any sample taken; a
    sample with more than `foreign_limit` of it is taken again.
    """

    def __init__(self, paths: dict[str, Path], foreign_limit: float = FOREIGN_LIMIT) -> None:
        self.foreign = 0.0
        self._foreign_limit = foreign_limit
        self._paths = paths
        self._read = MemoryRead()

    @contextmanager
    def workers(
        self, threads: int, context: int, streams: int = 1, memory: Memory | None = None
    ) -> Iterator[list[Worker]]:
        """Fresh processes of both sides, loaded; within `memory`, with nothing of their files in
        the page cache before."""
        with ExitStack() as stack:
            workers = []
            for side in SIDES:
                limit = None
                if memory is not None:
                    forget(self._paths[side])
                    limit = stack.enter_context(MemoryLimit(memory.limit))
                workers.append(stack.enter_context(Worker(side, limit)))
            for worker in workers:
                wait_until_quiet(PATIENCE_SECONDS)
                self._start(worker, threads, context, streams, memory)
            yield workers

    def rates(
        self,
        workers: list[Worker],
        threads: int,
        method: str,
        count: int,
        *,
        streams: int = 1,
        samples: int = SAMPLES,
        prepare: Callable[[Worker], object] = lambda worker: None,
        slowest: float | None = None,
    ) -> Samples:
        """Tokens per second of `method`, `count` tokens in each of `streams`, `samples` times.

        `slowest`: tokens per second that are waited for, if not the usual.
        """
        taken = Samples()
        for _ in range(samples):
            for worker in workers:
                reply = self._quietly(worker, method, count, streams, prepare, slowest)
                taken.values[worker.side].append(count * streams / reply.seconds)
                taken.reads += [self._read.measure(threads) for _ in range(_READS)]
        return taken

    def starts(self, threads: int, context: int, then: Callable[[Worker], Reply]) -> Starts:
        """Of fresh processes, which do `then` after their first token."""
        found = Starts()
        for _ in range(SAMPLES):
            for side in SIDES:
                wait_until_quiet(PATIENCE_SECONDS)
                started = time.perf_counter()
                with Worker(side) as worker:
                    reply = self._start(worker, threads, context)
                    found.exec.values[side].append(time.perf_counter() - started)
                    found.load.values[side].append(reply.seconds)
                    found.peak.values[side].append(then(worker).peak_bytes)
        return found

    def _start(
        self,
        worker: Worker,
        threads: int,
        context: int,
        streams: int = 1,
        memory: Memory | None = None,
    ) -> Reply:
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
            expert_budget=None if memory is None else memory.experts,
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
        slowest: float | None,
    ) -> Reply:
        """The least disturbed of a few samples; the first that nobody disturbed is enough."""
        foreign, best = math.inf, None
        for _ in range(_TRIES):
            prepare(worker)
            wait_until_quiet(PATIENCE_SECONDS)
            load = ForeignLoad()
            reply = timed(worker, method, count, streams, slowest)
            cores = load.cores(reply.cpu_seconds)
            if cores < foreign:
                foreign, best = cores, reply
            if foreign <= self._foreign_limit:
                break
            note(f"  disturbed: others used {cores:.2f} cores")
        assert best is not None
        self.foreign = max(self.foreign, foreign)
        return best


def timed(
    worker: Worker,
    method: str,
    count: int,
    streams: int = 1,
    slowest: float | None = None,
    **arguments: str,
) -> Reply:
    """`method` of `count` tokens; a side that is absurdly slow fails with WorkerError."""
    limit = count * streams / (slowest or _SLOWEST[method]) + _SPARE_SECONDS
    return worker.call(method, limit, count=count, **arguments)


def note(text: str) -> None:
    """Tells whoever waits how far the run is."""
    print(text, file=sys.stderr, flush=True)
