"""The benchmark of starts, on the embedded model."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import starts


def test_starts_are_measured(demo_artifact: Path) -> None:
    found = starts.measure(demo_artifact, samples=2)
    for listening, token in zip(found.listening, found.exec, strict=True):
        assert 0 < listening < token
    assert len(found.loaded) == len(found.unloaded) == 2
    assert abs(found.prompt - starts.PROMPT) <= 4
    idle = found.idle
    assert idle.anonymous > 5e6 and idle.files > 2e6
    assert idle.anonymous + idle.files < 45e6, f"an idle daemon weighs {idle} MB, not below 45"
    names = [name for name, _ in found.rows()]
    assert len(set(names)) == len(names) == 6


def test_a_daemon_that_cannot_start(tmp_path: Path) -> None:
    with starts.serving(tmp_path) as server:
        server.process.wait(60)  # it may have listened for a moment
        with pytest.raises(RuntimeError, match="has died"):
            server.connect()
