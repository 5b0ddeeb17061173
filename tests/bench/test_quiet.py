"""Foreign load from the system's counters, which the tests write themselves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bench import quiet


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Sets the clocks: wall, CPU of everybody and of this process, in seconds."""
    now = {"wall": 0.0, "own": 0.0}

    def advance(wall: float = 0.0, own: float = 0.0, everybody: float = 0.0) -> None:
        now["wall"] += wall
        now["own"] += own
        now["everybody"] = now.get("everybody", 0.0) + everybody
        ticks = round(now["everybody"] / quiet._TICK)
        (tmp_path / "stat").write_text(f"cpu  {ticks} 0 0 999 7 0 0 0 0 0\ncpu0 1 2 3\n")

    monkeypatch.setattr(quiet, "_STAT", tmp_path / "stat")
    monkeypatch.setattr("time.perf_counter", lambda: now["wall"])
    monkeypatch.setattr("time.process_time", lambda: now["own"])
    monkeypatch.setattr("time.sleep", lambda seconds: advance(seconds, 0, now["noise"]))
    now["noise"] = 0.0
    advance()
    machine = advance
    machine.now = now  # type: ignore[attr-defined]
    return machine


@pytest.mark.parametrize(
    ("everybody", "own", "measured", "cores"),
    [(2.0, 0.0, 0.0, 0.99), (2.0, 0.5, 1.5, 0.0), (2.0, 0.0, 1.6, 0.19), (0.01, 0.0, 0.0, 0.0)],
)
def test_foreign_load(
    machine: Callable[..., None], everybody: float, own: float, measured: float, cores: float
) -> None:
    load = quiet.ForeignLoad()
    machine(wall=2.0, own=own, everybody=everybody)
    assert load.cores(measured) == pytest.approx(cores)


@pytest.mark.parametrize(("noise", "quiet_at_last"), [(0.0, True), (0.2, False)])
def test_waits_until_quiet(machine: Callable[..., None], noise: float, quiet_at_last: bool) -> None:
    machine.now["noise"] = noise  # type: ignore[attr-defined]
    assert quiet.wait_until_quiet(3.0) is quiet_at_last


def test_the_system_counts_work() -> None:
    before = quiet.busy_seconds()
    assert before > 0
