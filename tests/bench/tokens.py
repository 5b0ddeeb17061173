"""The token ids that both sides are fed."""

from __future__ import annotations

import random

_draw = random.Random(20260101)


def random_tokens(count: int, vocab_size: int) -> list[int]:
    """`count` new ids, the same in every process: random ones visit the experts evenly."""
    return _draw.choices(range(vocab_size), k=count)
