"""emberd and llama.cpp with less memory than the model has experts, measured in turns.

Both run under the same hard limit (a cgroup each, so this takes root) from the same disk, with
nothing of the model cached at first: emberd with a budget for experts, llama.cpp with the file
mapped. Two models: `fifth`, whose random routers choose evenly, the worst case for every cache, and
one whose classes of tokens have experts of their own. Writes build/bench-residency.json and, as a
table, build/bench-residency.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from emberd.daemon.artifact import EXPERTS, WEIGHTS

from bench import checkpoint, skewed
from bench.measure import Bench, Memory, note, timed
from bench.memory_limit import MemoryLimitError
from bench.prepare import BUILD, prepare
from bench.table import Row, markdown, row, write_json
from bench.worker import Worker, WorkerError

SHARES = (50, 25)  # percent of the experts that fit
THREADS = 2
_DECODED = 16  # tokens of a sample
_PROMPT = 512
_CONTEXT = 4096
_SPARE_BYTES = 160 << 20  # for everything but weights: the interpreter, KV cache, buffers
_FOREIGN_LIMIT = 0.5  # cores; what the system does to read files counts as foreign
_SLOWEST = 0.2  # tokens a second that are waited for


@dataclass(frozen=True)
class Subject:
    """A model to measure; tokens of one topic are those with the same remainder by `topics`."""

    name: str
    write: Callable[[Path], object]
    topics: int


SUBJECTS = (
    Subject("fifth", checkpoint.write, 1),
    Subject("skewed", skewed.write, skewed.CLASSES),
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.residency", description=__doc__)
    parser.add_argument(
        "--only", choices=[subject.name for subject in SUBJECTS], help="one of the models"
    )
    only = parser.parse_args().only
    rows: list[Row] = []
    try:
        for subject in SUBJECTS:
            if only in (None, subject.name):
                for result in _measure(subject):
                    rows.append(result)
                    write_json(rows, BUILD / "bench-residency.json")
    except (WorkerError, MemoryLimitError) as error:
        note(f"bench: error: {error}")
        return 2
    table = markdown(rows)
    (BUILD / "bench-residency.md").write_text(table + "\n", encoding="utf-8")
    print(table)
    return 0


def _measure(subject: Subject) -> Iterator[Row]:
    folder = BUILD / ("bench" if subject.name == "fifth" else f"bench-{subject.name}")
    paths = prepare(folder, subject.write)
    bench = Bench(paths, _FOREIGN_LIMIT)
    weights, experts = ((paths["emberd"] / name).stat().st_size for name in (WEIGHTS, EXPERTS))
    for share in SHARES:
        budget = experts * share // 100
        memory = Memory(weights + budget + _SPARE_BYTES, budget)
        note(f"{subject.name}: {memory.limit / 1e6:.0f} MB, {budget / 1e6:.0f} of them for experts")
        with bench.workers(THREADS, _CONTEXT, memory=memory) as workers:
            yield from _rates(bench, subject, share, workers)


def _rates(bench: Bench, subject: Subject, share: int, workers: list[Worker]) -> Iterator[Row]:
    """Decode within a topic, then prefill of one that is new to the cache each time."""
    name = f"{subject.name}, {share} % of experts"

    def begin(worker: Worker) -> None:
        worker.call("clear", 60)
        timed(worker, "prefill", _PROMPT // 8, slowest=_SLOWEST)

    for worker in workers:
        worker.call("turn_to", 60, topic=0, topics=subject.topics)
        begin(worker)
    samples = bench.rates(workers, THREADS, "decode", _DECODED, slowest=_SLOWEST)
    yield row(f"{name}, decode", THREADS, "tok/s", "higher", samples.values)

    def clear(worker: Worker) -> None:
        worker.call("clear", 60)

    samples = bench.rates(workers, THREADS, "prefill", _PROMPT, prepare=clear, slowest=_SLOWEST * 4)
    yield row(f"{name}, prefill {_PROMPT}", THREADS, "tok/s", "higher", samples.values)


if __name__ == "__main__":
    sys.exit(main())
