"""Prompts cut into the chunk sizes of an artifact."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from emberd.daemon.core import Model
from emberd.daemon.session import LogitsRole, Session


def cut(tokens: np.ndarray, model: Model, generator: np.random.Generator) -> Iterator[np.ndarray]:
    """`tokens` i32[T] in random chunks of up to the largest that the model takes."""
    sizes = [size for size in (1, 2, 7, 33) if size < model.max_chunk]
    start = 0
    while start < len(tokens):
        size = int(generator.choice([*sizes, model.max_chunk]))
        yield tokens[start : start + size]
        start += size


def step(session: Session, tokens: np.ndarray, role: LogitsRole = LogitsRole.ALL) -> np.ndarray:
    """A copy of the logits f32[T or 1, V] of a chunk."""
    logits = session.step(tokens.tolist(), role)
    assert logits is not None
    return np.array(logits.memory())
