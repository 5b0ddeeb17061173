"""The figures of the benchmark: what is run for each, in groups that share fresh processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from emberd.compile.traffic import decode_traffic
from emberd.daemon.artifact import Artifact
from emberd.daemon.program import Program

from bench import multiply, outside
from bench.measure import PATIENCE_SECONDS, Bench, Samples, note, timed
from bench.peak import has_vnni
from bench.quiet import wait_until_quiet
from bench.table import Row, row
from bench.worker import Reply, Worker, WorkerError

DECODED = 32  # tokens of one sample
_DECODES = 9  # samples: short ones, and what memory gives changes from second to second
_TRIES = 3  # for a group of figures
_MEBIBYTE = 1 << 20
_STREAM_CONTEXT = 1024


@dataclass(frozen=True)
class Plan:
    """What to measure. `contexts`: tokens before the decoded ones, ascending."""

    threads: tuple[int, ...] = (1, 2)
    contexts: tuple[int, ...] = (0, 1024, 8192, 32768)
    prompts: tuple[int, ...] = (32, 128, 512, 2048)
    streams: tuple[int, ...] = (1, 2, 4, 8)
    starts: bool = True
    outside: bool = True
    multiply: bool = has_vnni()


FULL = Plan()
QUICK = Plan(
    contexts=(0,), prompts=(128, 512), streams=(), starts=False, outside=False, multiply=False
)


def measure(bench: Bench, plan: Plan, artifact: Artifact) -> Iterator[Row]:
    """The rows, group by group. Raises WorkerError when a side fails again and again."""
    for threads in plan.threads:
        yield from _again(_one_stream, bench, threads, plan, artifact)
        for streams in plan.streams:
            yield from _again(_streams, bench, threads, streams)
        if plan.starts:
            yield from _again(_starts, bench, threads)
        if plan.outside:
            yield _outside(threads, artifact)
        if plan.multiply:
            wait_until_quiet(PATIENCE_SECONDS)
            yield from map(_told, multiply.measure(artifact, threads))


def _again(group: Callable[..., Iterator[Row]], *arguments: Any) -> list[Row]:
    """A group's rows; from the start, in fresh processes, when a side failed or got stuck."""
    for _ in range(_TRIES - 1):
        try:
            return list(group(*arguments))
        except WorkerError as error:
            note(f"  {error}: once more")
    return list(group(*arguments))


def _one_stream(bench: Bench, threads: int, plan: Plan, artifact: Artifact) -> Iterator[Row]:
    """Prefill from nothing, then decode at growing contexts."""
    with bench.workers(threads, _capacity(plan)) as workers:
        for prompt in plan.prompts:
            samples = bench.rates(workers, threads, "prefill", prompt, prepare=_clear)
            yield _told(row(f"prefill {prompt}", threads, "tok/s", "higher", samples.values))
        decode = partial(bench.rates, workers, threads, "decode", DECODED, samples=_DECODES)
        for context in plan.contexts:
            if context == 0:
                samples = decode(prepare=_begin)
            else:
                for worker in workers:
                    worker.call("clear", 60)
                    timed(worker, "fill", context)
                samples = decode()
            name = f"decode, context {context}"
            yield _told(row(name, threads, "tok/s", "higher", samples.values))
            yield _told(_moved(name, threads, samples, artifact, context))


def _moved(name: str, threads: int, samples: Samples, artifact: Artifact, context: int) -> Row:
    """Bytes a second that emberd's tokens had to move; in the place of the peer, what memory gave
    between the samples."""
    program = Program.decode(artifact.program)
    needed = decode_traffic(program, artifact.model.vocab_size, context + DECODED // 2).total
    note(f"  {needed / 1e6:.0f} MB a token")
    values = {
        "emberd": [needed * rate / 1e9 for rate in samples.values["emberd"]],
        "peer": [read / 1e9 for read in samples.reads],
    }
    return row(f"{name}: moved beside memory read", threads, "GB/s", "higher", values)


def _streams(bench: Bench, threads: int, streams: int) -> Iterator[Row]:
    with bench.workers(threads, _STREAM_CONTEXT, streams) as workers:
        samples = bench.rates(
            workers,
            threads,
            "decode",
            DECODED,
            streams=streams,
            samples=_DECODES,
            prepare=_begin,
        )
    plural = "s" if streams > 1 else ""
    name = f"decode, {streams} stream{plural}"
    yield _told(row(name, threads, "tok/s", "higher", samples.values))


def _starts(bench: Bench, threads: int) -> Iterator[Row]:
    """Without HTTP, which bench.starts measures: both in a Python process that runs C."""

    def work(worker: Worker) -> Reply:
        timed(worker, "prefill", 512)
        return timed(worker, "decode", DECODED)

    found = bench.starts(threads, 4096, work)
    yield _told(row("exec to first token", threads, "s", "lower", found.exec.values))
    yield _told(row("load to first token", threads, "s", "lower", found.load.values))
    sizes = {side: [x / _MEBIBYTE for x in values] for side, values in found.peak.values.items()}
    yield _told(row("peak memory", threads, "MiB", "lower", sizes))


def _outside(threads: int, artifact: Artifact) -> Row:
    """What a token of the engine costs outside kernels; in the place of the peer, all it costs."""
    wait_until_quiet(PATIENCE_SECONDS)
    tokens = outside.measure(artifact, threads, {"greedy": outside.SAMPLINGS["greedy"]})["greedy"]
    values = {
        "emberd": [1e6 * token.outside for token in tokens],
        "peer": [1e6 * token.seconds for token in tokens],
    }
    return _told(row("token: outside kernels beside all of it", threads, "us", "lower", values))


def _capacity(plan: Plan) -> int:
    """Tokens that a session must hold: the longest context and some samples, with retries."""
    return max([*plan.contexts, *plan.prompts], default=0) + 2048


def _clear(worker: Worker) -> None:
    worker.call("clear", 60)


def _begin(worker: Worker) -> None:
    """An empty session whose memory has been touched."""
    _clear(worker)
    timed(worker, "decode", 1)


def _told(result: Row) -> Row:
    note(
        f"{result.figure}, {result.threads} thread{'s' * (result.threads > 1)}: "
        f"{result.emberd:.4g} / {result.peer:.4g} {result.unit} = {result.ratio:.2f}"
    )
    return result
