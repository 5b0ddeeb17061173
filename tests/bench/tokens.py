"""The token ids that both sides are fed."""

from __future__ import annotations

import random

_SEED = 20260101


class Tokens:
    """New ids again and again, the same in every process: random ones visit the experts evenly."""

    def __init__(self, vocab_size: int) -> None:
        self._draw = random.Random(_SEED)
        self._vocab_size = vocab_size
        self._choices = range(vocab_size)

    def turn_to(self, topic: int, topics: int) -> None:
        """From now on, ids with `topic` as the remainder by `topics`."""
        self._choices = range(topic, self._vocab_size, topics)

    def take(self, count: int) -> list[int]:
        """The next `count` ids."""
        return self._draw.choices(self._choices, k=count)
