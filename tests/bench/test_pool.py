"""Regions on the daemon's pool are timed, whatever the machine does meanwhile."""

from __future__ import annotations

import pytest

from bench import pool


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_STEPS", 10)


def test_every_kind_of_region_is_timed() -> None:
    found = pool.measure(threads=2, rounds=2, count=3)
    lengths = {name: len(values) for name, values in vars(found).items()}
    assert lengths == {"awake": 6, "asleep": 2, "single": 2, "alone": 2, "disturbed": 2}
    assert all(min(values) > 0 for values in vars(found).values())


def test_a_pool_without_threads() -> None:
    with pytest.raises(RuntimeError, match="0 threads, expected 1 to"):
        pool.Pool(0)


def test_the_table() -> None:
    found = pool.Costs([0.3, 0.2, 0.9], [60.0], [300.0], [150.0], [160.0])
    lines = pool.table(found, 2).splitlines()
    assert lines[2] == "| launch, workers awake | 0.3 (0.2) | < 1 |"
    assert lines[-1] == "| region, 2 threads, a core taken | 160 (160) | ≤ 1 thread |"
