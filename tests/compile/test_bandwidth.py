"""The stream read covers its memory once, whatever the number of threads."""

from __future__ import annotations

import numpy as np
import pytest
from emberd.compile import bandwidth


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_reads_every_byte_once(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    seen: list[int] = []

    class Counting:
        @staticmethod
        def reduce(words: np.ndarray) -> None:
            assert (words == 1).all()
            seen.append(words.nbytes)

    monkeypatch.setattr(bandwidth, "_BYTES", 1 << 20)
    monkeypatch.setattr(bandwidth.np, "bitwise_or", Counting)
    assert bandwidth.MemoryRead().measure(threads) > 0
    assert len(seen) == threads
    assert sum(seen) == 1 << 20
