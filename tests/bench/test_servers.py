"""Servers that are measured, where they cannot start or answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.servers import EmberdServer


def test_a_daemon_that_cannot_start(tmp_path: Path) -> None:
    with EmberdServer(tmp_path) as server:
        server.process.wait(60)  # it may have listened for a moment
        with pytest.raises(RuntimeError, match="has died"):
            server.connect()


def test_a_refusal_is_no_figure(demo_artifact: Path) -> None:
    with EmberdServer(demo_artifact, context=8) as server:
        server.connect()
        with pytest.raises(RuntimeError, match="not answered"):
            server.ask("a question of more than eight tokens, which is too many")
