"""emberd and llama.cpp with less memory than the model has experts, measured in turns.

Both run under the same hard limit (a cgroup each, so this takes root) from the same disk, with
nothing of the model cached at first: emberd with a budget for experts, llama.cpp with the file
mapped. Two models: `fifth`, whose random routers choose evenly, the worst case for every cache, and
one whose classes of tokens have experts of their own. Writes build/bench-residency.json and, as a
table, build/bench-residency.md.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from emberd.compile.residency.counts import RoutingCounts
from emberd.compile.residency.replay import Step, replay
from emberd.daemon.artifact import EXPERTS, WEIGHTS, Artifact
from emberd.daemon.core import Model
from emberd.daemon.policies import POLICIES
from emberd.daemon.trace import RoutingTrace

from bench import checkpoint, skewed
from bench.measure import PROMPT, SAMPLES, Bench, Memory, note, timed
from bench.memory_limit import MemoryLimit, MemoryLimitError, find_memory, forget
from bench.prepare import BUILD, prepare
from bench.table import Row, markdown, row, write_json
from bench.worker import SIDES, Worker, WorkerError

SHARES = (50, 25)  # percent of the experts that fit
THREADS = 2
_DECODED = 16  # tokens of a sample
_PROMPT = 512
_CONTEXT = 4096
_SPARE_BYTES = 160 << 20  # for everything but weights: the interpreter, KV cache, buffers
_FOREIGN_LIMIT = 0.5  # cores; what the system does to read files counts as foreign
_FIRST_TOKENS = 50
_RECORDED_TOKENS = 128
_IDLE_SECONDS = 1.0  # between loading and the first prompt
_MAPPED_TOKENS = 512
_SLOWEST = 0.2  # tokens a second that are waited for


@dataclass(frozen=True)
class Subject:
    """A model to measure; tokens of one topic are those with the same remainder by `topics`."""

    name: str
    write: Callable[[Path], object]
    topics: int


SUBJECTS = (
    Subject("fifth", checkpoint.write_fifth, 1),
    Subject("skewed", skewed.write_skewed, skewed.CLASSES),
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
    if subject.topics > 1:
        _write_map(subject, paths["emberd"])
    for share in SHARES:
        budget = experts * share // 100
        memory = Memory(weights + budget + _SPARE_BYTES, budget)
        note(f"{subject.name}: {memory.limit / 1e6:.0f} MB, {budget / 1e6:.0f} of them for experts")
        with bench.workers(THREADS, _CONTEXT, memory=memory) as workers:
            yield from _rates(bench, subject, share, workers)
            yield _hit_rate(subject, share, workers[0], budget)
        if subject.topics > 1:
            yield _first_tokens(subject, paths, share, memory)


def _first_tokens(subject: Subject, paths: dict[str, Path], share: int, memory: Memory) -> Row:
    """A prompt and its answer, each of another topic, in a process that loaded a second ago with
    nothing cached: with the map (in the place of emberd), and by plain LRU (in its peer's)."""
    activation_map = paths["emberd"].parent / "expert_activation_map.bin"
    known = {"emberd": str(activation_map), "peer": None}
    policies = {"emberd": "", "peer": "lru"}
    values: dict[str, list[float]] = {side: [] for side in SIDES}
    for topic in range(SAMPLES):
        for side in SIDES:
            forget(paths["emberd"])
            find_memory(memory.limit)
            with MemoryLimit(memory.limit) as limit, Worker("emberd", limit) as worker:
                worker.call(
                    "open",
                    120,
                    path=str(paths["emberd"]),
                    threads=THREADS,
                    context=_CONTEXT,
                    expert_budget=memory.experts,
                    activation_map=known[side],
                    expert_policy=policies[side],
                )
                time.sleep(_IDLE_SECONDS)
                worker.call("turn_to", 60, topic=topic, topics=subject.topics)
                reply = worker.call("answer", 120, prompt=PROMPT, count=_FIRST_TOKENS)
                values[side].append(reply.seconds)
    name = f"{subject.name}, {share} % of experts, first {_FIRST_TOKENS} tokens, map / plain LRU"
    return row(name, THREADS, "s", "lower", values)


def _hit_rate(subject: Subject, share: int, worker: Worker, budget: int) -> Row:
    """Of tokens of one topic that begin with an empty store, beside the most that was possible with
    its slots: that of Belady, who knows all of the tokens (in the place of the peer)."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        worker.call("clear", 60)
        timed(worker, "record", _RECORDED_TOKENS, slowest=_SLOWEST, path=str(path))
        found = json.loads(path.read_text(encoding="utf-8"))
    steps = [
        Step(1, [[(layer, expert) for expert in chosen] for layer, chosen in enumerate(token)])
        for token in found["ids"]
    ]
    best = replay([("", steps)], POLICIES["belady"], budget // found["expert_bytes"])
    rates = {
        "emberd": [100 * found["hits"] / (found["hits"] + found["misses"])],
        "peer": [100 * best.hit_rate],
    }
    name = f"{subject.name}, {share} % of experts, hit rate"
    return row(name, THREADS, "%", "higher", rates)


def _write_map(subject: Subject, artifact: Path) -> None:
    """The activation map of the topics, from tokens that no sample is made of."""
    opened = Artifact.open(artifact)
    draw = random.Random(subject.name)
    with Model(opened, THREADS) as model:
        layout = model.experts
        counts = RoutingCounts(layout.layers, layout.experts, layout.top_k)
        for topic in range(subject.topics):
            tokens = draw.choices(range(topic, model.vocab_size, subject.topics), k=_MAPPED_TOKENS)
            with RoutingTrace(model) as trace, model.open_session(_MAPPED_TOKENS) as session:
                session.prefill(tokens)
            counts.add(f"topic {topic}", np.asarray(trace.take().ids))
    data = counts.to_map(opened.model.identity).to_bytes()
    (artifact.parent / "expert_activation_map.bin").write_bytes(data)


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
