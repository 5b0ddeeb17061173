"""Which figures a plan gives, and what the workers are told for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from checkpoints import TinyModel, write_checkpoint
from emberd.compile.build import build
from emberd.compile.convert import convert
from emberd.daemon.artifact import Artifact

from bench import multiply, outside
from bench.figures import FULL, QUICK, Plan, measure
from bench.measure import Samples, Starts
from bench.outside import Token
from bench.table import row
from bench.worker import Reply, WorkerError

TINY = TinyModel("figures", layers="DA", hidden=64, vocab=64)


class Recorder:
    """A worker that only keeps what it is told."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def call(self, method: str, limit_seconds: float, **arguments: Any) -> Reply:
        self.calls.append((method, *arguments.values()))
        return Reply(1.0, 1.0, 3 << 20)


class FakeBench:
    """Stands for measure.Bench: emberd is twice as fast as the peer."""

    def __init__(self) -> None:
        self.worker = Recorder()
        self.opened: list[tuple[int, int, int]] = []
        self.failures = 0

    @contextmanager
    def workers(self, threads: int, context: int, streams: int = 1) -> Iterator[list[Recorder]]:
        self.opened.append((threads, context, streams))
        yield [self.worker]

    def rates(
        self,
        workers: list[Recorder],
        threads: int,
        method: str,
        count: int,
        *,
        streams: int = 1,
        samples: int = 5,
        prepare: Callable[[Recorder], object] = lambda worker: None,
    ) -> Samples:
        if self.failures:
            self.failures -= 1
            raise WorkerError("peer took too long")
        prepare(self.worker)
        self.worker.calls.append((method, count, streams))
        assert samples >= 5
        return Samples({"emberd": [20.0], "peer": [10.0]}, [1e6, 2e6, 9e6])

    def starts(self, threads: int, context: int, then: Callable[[Recorder], Reply]) -> Any:
        peak = then(self.worker).peak_bytes
        return Starts(
            exec=Samples({"emberd": [3.0], "peer": [4.0]}),
            load=Samples({"emberd": [1.0], "peer": [2.0]}),
            peak=Samples({"emberd": [peak], "peer": [peak]}),
        )


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    folder = tmp_path_factory.mktemp("figures")
    write_checkpoint(folder / "checkpoint", TINY)
    convert(folder / "checkpoint", folder / "converted")
    build(folder / "converted", folder / "artifact", "host", "f32", chunk_sizes=(1,))
    return Artifact.open(Path(folder / "artifact"))


def test_one_of_each(artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    bench: Any = FakeBench()
    spent = {"greedy": [Token(0.01, 0.0002), Token(0.02, 0.0003)]}
    monkeypatch.setattr(outside, "measure", lambda artifact, threads, samplings: spent)
    shares = [row("prefill 512: experts", 2, "Gop/s", "higher", {"emberd": [7.0], "peer": [10.0]})]
    monkeypatch.setattr(multiply, "measure", lambda artifact, threads: shares)
    plan = Plan(threads=(2,), contexts=(0, 100), prompts=(32,), streams=(4,), multiply=True)
    rows = {row.figure: row for row in measure(bench, plan, artifact)}
    assert list(rows) == [
        "prefill 32",
        "decode, context 0",
        "decode, context 0: moved beside memory read",
        "decode, context 100",
        "decode, context 100: moved beside memory read",
        "decode, 4 streams",
        "exec to first token",
        "load to first token",
        "peak memory",
        "token: outside kernels beside all of it",
        "prefill 512: experts",
    ]
    assert {row.threads for row in rows.values()} == {2}
    assert rows["decode, 4 streams"].must == 1.5
    assert (rows["peak memory"].emberd, rows["peak memory"].unit) == (3, "MiB")
    token = rows["token: outside kernels beside all of it"]
    assert (token.emberd, token.must) == (pytest.approx(250), 0.03)
    assert token.ratio == pytest.approx(250 / 15000)
    assert [streams for _, _, streams in bench.opened] == [1, 4]
    assert all(context >= 100 + 32 for _, context, _ in bench.opened)
    assert bench.worker.calls == [
        *[("clear",), ("prefill", 32, 1)],
        *[("clear",), ("decode", 1), ("decode", 32, 1)],
        *[("clear",), ("fill", 100), ("decode", 32, 1)],
        *[("clear",), ("decode", 1), ("decode", 32, 4)],
        *[("prefill", 512), ("decode", 32)],
    ]


def test_what_decoding_moves(artifact: Artifact) -> None:
    """Rates times bytes of a token beside the median read; more context is more bytes."""
    bench: Any = FakeBench()
    plan = Plan((1,), (0, 100), (), (), starts=False, outside=False, multiply=False)
    rows = {row.figure: row for row in measure(bench, plan, artifact)}
    short, long = (rows[f"decode, context {n}: moved beside memory read"] for n in (0, 100))
    assert (short.peer, short.must, long.must) == (2e-3, 0.85, None)
    per_token = artifact.program.section_bytes["kv_per_token"]
    assert long.emberd - short.emberd == pytest.approx(20 * 100 * per_token / 1e9)
    assert short.ratio == pytest.approx(short.emberd / 2e-3)


@pytest.mark.parametrize(("failures", "fails"), [(0, False), (2, False), (3, True)])
def test_a_group_is_tried_again(artifact: Artifact, failures: int, fails: bool) -> None:
    bench: Any = FakeBench()
    bench.failures = failures
    plan = Plan((1,), (), (32,), (), starts=False, outside=False, multiply=False)
    with pytest.raises(WorkerError) if fails else nullcontext():
        assert [row.figure for row in measure(bench, plan, artifact)] == ["prefill 32"]
    assert len(bench.opened) == min(failures + 1, 3)


def test_plans() -> None:
    assert FULL.contexts == (0, 1024, 8192, 32768)
    assert FULL.prompts == (32, 128, 512, 2048)
    assert FULL.streams == (1, 2, 4, 8)
    assert set(QUICK.prompts) < set(FULL.prompts)
    assert QUICK.threads == FULL.threads == (1, 2)
