"""CPU of a process is read as the system counts it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from bench import idle


def test_cpu_seconds_of_this_process() -> None:
    before = idle._cpu_seconds(os.getpid())
    started = time.process_time()
    while time.process_time() < started + 0.1:
        pass
    assert idle._cpu_seconds(os.getpid()) - before == pytest.approx(0.1, abs=0.05)


def test_a_daemon_is_measured_loaded_and_unloaded(
    demo_artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idle, "_SETTLE_SECONDS", 0.0)
    found = idle.measure(demo_artifact, 0.2)
    assert list(found) == ["model loaded", "model unloaded"]
    assert min(found.values()) >= 0
