"""A context of llama.cpp that was computed once is read from a file the next time."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from checkpoints import TinyModel, write_checkpoint
from emberd.compile.convert import convert
from emberd.compile.converted import ConvertedModel

pytestmark = pytest.mark.usefixtures("llama_cpp")

TINY = TinyModel("peer_side", layers="DA", hidden=64, vocab=64)


@pytest.fixture
def peer(tmp_path: Path) -> Path:
    from bench.peer_file import write

    write_checkpoint(tmp_path / "checkpoint", TINY)
    convert(tmp_path / "checkpoint", tmp_path / "converted")
    write(ConvertedModel.load(tmp_path / "converted"), "f32", tmp_path / "peer.gguf")
    return tmp_path / "peer.gguf"


def filled(peer: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], np.ndarray]:
    """The numbers of tokens that were computed to fill a context with 40, and logits behind it."""
    from bench.peer_side import PeerSide

    side, computed = PeerSide(), []
    side.start(str(peer), threads=1, context=64, streams=1, prompt=4)
    side.clear()
    with monkeypatch.context() as patched:
        prefill = side.prefill
        patched.setattr(side, "prefill", lambda count: computed.append(count) or prefill(count))
        side.fill(40)
    logits = side.logits([1, 2])
    side.close()
    return computed, logits


def test_a_filled_context_is_kept(peer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    computed, expected = filled(peer, monkeypatch)
    assert computed == [40]
    computed, logits = filled(peer, monkeypatch)
    assert computed == []
    np.testing.assert_array_equal(logits, expected)


def test_a_context_of_an_older_file_is_computed_anew(
    peer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, expected = filled(peer, monkeypatch)
    os.utime(peer.with_name("peer.gguf.40-tokens"), (0, 0))
    computed, logits = filled(peer, monkeypatch)
    assert computed == [40]
    np.testing.assert_array_equal(logits, expected)
    assert filled(peer, monkeypatch)[0] == []
