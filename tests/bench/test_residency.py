"""Every figure that a bound is set for is measured, in turns, within the limit of memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bench import residency
from bench.measure import Memory, Samples
from bench.table import TARGETS, row
from bench.worker import SIDES, Reply


class FakeWorker:
    def __init__(self, side: str, told: list[tuple[str, str, dict[str, Any]]]) -> None:
        self.side = side
        self._told = told

    def call(self, method: str, _limit: float, **arguments: Any) -> Reply:
        self._told.append((self.side, method, arguments))
        if method == "record":
            ids = [[[0, 1]], [[2, 3]], [[0, 1]], [[2, 3]]]
            found = {"hits": 1, "misses": 7, "expert_bytes": 500, "ids": ids}
            Path(arguments["path"]).write_text(json.dumps(found))
        return Reply(1.0, 0.0, 0)


class FakeBench:
    """Ten tokens a second here, two there."""

    told: list[tuple[str, str, dict[str, Any]]]
    memories: list[Memory]

    def __init__(self, paths: dict[str, Path], foreign_limit: float) -> None:
        self._told = self.told
        assert set(paths) == set(SIDES)
        assert foreign_limit < 1

    @contextmanager
    def workers(self, threads: int, _context: int, memory: Memory) -> Iterator[list[FakeWorker]]:
        assert threads == residency.THREADS
        self.memories.append(memory)
        yield [FakeWorker(side, self._told) for side in SIDES]

    def rates(self, workers: list[Any], _threads: int, *_arguments: Any, **options: Any) -> Samples:
        prepare: Callable[[Any], object] = options.get("prepare", lambda _worker: None)
        for worker in workers:
            prepare(worker)
        return Samples({"emberd": [10.0] * 5, "peer": [2.0] * 5})


def test_all_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency, "Bench", FakeBench)
    FakeBench.told, FakeBench.memories = [], []
    artifact = tmp_path / "artifact"
    artifact.mkdir()
    (artifact / "weights.bin").write_bytes(bytes(1000))
    (artifact / "experts.bin").write_bytes(bytes(4000))
    paths = {"emberd": artifact, "peer": tmp_path / "peer"}
    monkeypatch.setattr(residency, "prepare", lambda _folder, _write: paths)
    values = {"emberd": [1.0], "peer": [2.0]}
    monkeypatch.setattr(
        residency,
        "_first_tokens",
        lambda subject, _paths, share, _memory: row(
            f"{subject.name}, {share} % of experts, first 50 tokens, map / plain LRU",
            2,
            "s",
            "lower",
            values,
        ),
    )
    monkeypatch.setattr(residency, "_write_map", lambda _subject, _artifact: None)
    rows = [row for subject in residency.SUBJECTS for row in residency._measure(subject)]
    asked = {figure for figure, _ in TARGETS if "% of experts" in figure}
    assert asked <= {row.figure for row in rows}
    hits = [row for row in rows if row.unit == "%"]
    assert [(row.emberd, row.peer) for row in hits] == [(12.5, 50.0), (12.5, 25.0)] * 2
    assert [row.holds for row in hits] == [False, True] * 2
    rows = [row for row in rows if row.unit == "tok/s"]
    assert {row.ratio for row in rows} == {5.0}
    failing = {row.figure for row in rows if row.holds is False}
    assert failing == {"fifth, 25 % of experts, decode", "skewed, 25 % of experts, decode"}
    budgets = [memory.experts for memory in FakeBench.memories]
    assert budgets == [2000, 1000] * 2
    spare = {memory.limit - memory.experts - 1000 for memory in FakeBench.memories}
    assert spare == {residency._SPARE_BYTES}
    turns = [(side, told["topics"]) for side, method, told in FakeBench.told if method == "turn_to"]
    assert turns == [(side, topics) for topics in (1, 1, 8, 8) for side in SIDES]
