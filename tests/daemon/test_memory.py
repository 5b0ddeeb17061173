"""Memory for the core: zeroed, and refused with a reason."""

from __future__ import annotations

import ctypes

import pytest
from emberd.daemon.errors import EmberdError
from emberd.daemon.memory import address, anonymous_memory


@pytest.mark.parametrize("size", [0, 1, 4097])
def test_memory_is_zeroed_and_stays_where_it_is(size: int) -> None:
    memory = anonymous_memory(size, "a test")
    assert len(memory) == max(size, 1)
    assert ctypes.string_at(address(memory), len(memory)) == bytes(len(memory))
    memory[0] = 7
    assert ctypes.string_at(address(memory), 1) == b"\7"


@pytest.mark.parametrize("size", [1 << 60, 1 << 70])
def test_too_much(size: int) -> None:
    with pytest.raises(EmberdError, match=f"cannot reserve {size} bytes for a test"):
        anonymous_memory(size, "a test")
