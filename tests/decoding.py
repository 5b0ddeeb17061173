"""Decoding with the embedded model."""

from __future__ import annotations

import numpy as np
from emberd.daemon.core import Model
from numpy.typing import NDArray
from tiny_model import last_row

TOKENS = [(7 * i * i + 3 * i) % 500 for i in range(60)]


def decode(model: Model, tokens: list[int]) -> NDArray[np.float32]:
    """Logits [tokens, vocabulary], each token decoded on its own."""
    rows = []
    with model.open_session(len(tokens)) as session:
        for token in tokens:
            rows += last_row(model.step_batch([session], [token]))
    return np.array(rows, np.float32).reshape(len(tokens), -1)
