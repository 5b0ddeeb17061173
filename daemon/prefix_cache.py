"""Slots: sessions that remember what they hold, so that a conversation's next turn is short.

A recurrent state cannot be cut back, so a prompt can go on only from a boundary: the state as it
stands, or a snapshot taken at the end of an earlier turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

from emberd.daemon.protocols import LogitsView, SessionLike

SNAPSHOTS_PER_SLOT = 4
_clock = count(1)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences share from their start."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while low < high:  # a[:low] == b[:low]; a[:high + 1] != b[:high + 1]
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class Slot:
    """A session, the tokens in it, and snapshots of its state at earlier boundaries.

    Whoever makes a step of the session outside of `step` adds its tokens to `tokens`.
    """

    def __init__(self, session: SessionLike) -> None:
        self.session = session
        self.tokens: list[int] = []
        self._snapshots: dict[int, Any] = {}  # length -> snapshot, least recently used first
        self.last_used = 0

    def reusable(self, prompt: Sequence[int]) -> int:
        """How many tokens of ``prompt`` need no prefill; always fewer than all of them."""
        shared = min(common_prefix(self.tokens, prompt), len(prompt) - 1)
        boundaries = (length for length in (len(self.tokens), *self._snapshots) if length <= shared)
        return max(boundaries, default=0)

    def go_back(self, length: int) -> None:
        """Return to a boundary that `reusable` named, or to the empty state."""
        self.last_used = next(_clock)
        if length == len(self.tokens):
            return
        if length == 0:
            self.reset()
            return
        snapshot = self._snapshots.pop(length)
        self.session.restore(snapshot)
        self._snapshots[length] = snapshot
        self._snapshots = {at: kept for at, kept in self._snapshots.items() if at <= length}
        del self.tokens[length:]

    def step(self, tokens: Sequence[int], logits: Any) -> LogitsView | None:
        """Run tokens through the model, at most its max_chunk."""
        view = self.session.step(tokens, logits)
        self.tokens += tokens
        return view

    def save(self) -> None:
        """Make the present state a boundary."""
        self._snapshots.pop(len(self.tokens), None)
        while len(self._snapshots) >= SNAPSHOTS_PER_SLOT:
            del self._snapshots[next(iter(self._snapshots))]
        self._snapshots[len(self.tokens)] = self.session.snapshot()

    def reset(self) -> None:
        """Forget everything."""
        self.session.reset()
        self.tokens.clear()
        self._snapshots.clear()

    def close(self) -> None:
        self.session.close()


def choose(idle: Sequence[Slot], prompt: Sequence[int]) -> tuple[Slot, int]:
    """The idle slot to use and the boundary to go on from; without any, the least recently used."""
    reuse, _, index = max(
        (slot.reusable(prompt), -slot.last_used, index) for index, slot in enumerate(idle)
    )
    return idle[index], reuse
