"""Sides are measured in turns, and a disturbed sample is taken again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench import measure
from bench.measure import Bench
from bench.worker import Reply


class FakeWorker:
    """Answers at once; keeps what it was told, with all others, in `log`."""

    log: list[tuple[str, str, dict[str, Any]]]
    limits: list[float]

    def __init__(self, side: str, limit: None = None) -> None:
        self.side = side

    def call(self, method: str, limit_seconds: float, **arguments: Any) -> Reply:
        self.log.append((self.side, method, arguments))
        self.limits.append(limit_seconds)
        return Reply(2.0 if self.side == "emberd" else 4.0, 1.0, 100)

    def close(self) -> None:
        self.log.append((self.side, "close", {}))

    def __enter__(self) -> FakeWorker:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class FakeLoad:
    """Foreign load as `script` has it, then none."""

    script: Iterator[float]

    def cores(self, own_seconds: float) -> float:
        assert own_seconds == 1.0
        return next(self.script, 0.0)


class FakeRead:
    def measure(self, threads: int) -> float:
        return 1e9 * threads


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    FakeWorker.log, FakeWorker.limits, FakeLoad.script = [], [], iter([])
    monkeypatch.setattr(measure, "Worker", FakeWorker)
    monkeypatch.setattr(measure, "ForeignLoad", FakeLoad)
    monkeypatch.setattr(measure, "MemoryRead", FakeRead)
    monkeypatch.setattr(measure, "wait_until_quiet", lambda seconds: True)
    return Bench({"emberd": Path("artifact"), "peer": Path("file")})


def test_rates_in_turns(bench: Bench) -> None:
    with bench.workers(threads=2, context=64, streams=4) as workers:
        samples = bench.rates(
            workers, 2, "decode", 8, streams=4, prepare=lambda worker: worker.call("clear", 1)
        )
    assert samples.values == {"emberd": [16.0] * 5, "peer": [8.0] * 5}
    assert set(samples.reads) == {2e9}
    settings = {"threads": 2, "context": 64, "streams": 4, "prompt": 16, "expert_budget": None}
    pair = [
        (side, *call)
        for side in ("emberd", "peer")
        for call in (("clear", {}), ("decode", {"count": 8}))
    ]
    assert FakeWorker.log == [
        ("emberd", "start", {"path": "artifact", **settings}),
        ("peer", "start", {"path": "file", **settings}),
        *pair * 5,
        ("peer", "close", {}),
        ("emberd", "close", {}),
    ]


@pytest.mark.parametrize(
    ("loads", "calls", "foreign"),
    [([0.0, 0.0], 10, 0.0), ([0.5, 0.1], 11, 0.1), ([0.5, 0.3, 0.4], 12, 0.3)],
)
def test_disturbed_samples_are_taken_again(
    bench: Bench, loads: list[float], calls: int, foreign: float
) -> None:
    FakeLoad.script = iter(loads)
    bench.rates([FakeWorker("emberd"), FakeWorker("peer")], 1, "prefill", 32)  # type: ignore[list-item]
    assert len(FakeWorker.log) == calls
    assert bench.foreign == foreign


def test_as_many_samples_as_are_wanted(bench: Bench) -> None:
    """And memory is read between any two of them."""
    with bench.workers(threads=1, context=64) as workers:
        samples = bench.rates(workers, 1, "decode", 8, samples=7)
    assert {side: len(values) for side, values in samples.values.items()} == {
        "emberd": 7,
        "peer": 7,
    }
    assert len(samples.reads) == 4 * 14


def test_starts_are_of_fresh_processes(bench: Bench) -> None:
    found = bench.starts(1, 64, lambda worker: worker.call("decode", 9, count=3))
    assert found.load.values == {"emberd": [2.0] * 5, "peer": [4.0] * 5}
    assert found.peak.values == {"emberd": [100] * 5, "peer": [100] * 5}
    assert all(len(seconds) == 5 and min(seconds) > 0 for seconds in found.exec.values.values())
    assert [method for _, method, _ in FakeWorker.log] == ["start", "decode", "close"] * 10


def test_more_tokens_may_take_longer(bench: Bench) -> None:
    for count in (1, 512):
        measure.timed(FakeWorker("peer"), "prefill", count)  # type: ignore[arg-type]
    short, long = FakeWorker.limits
    assert 1 < short < long < 120
