"""What all predictors of routing have in common, each of which is a file beside this one."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from emberd.compile.residency.trace import CommandTrace
from numpy.typing import NDArray

AHEAD = 3  # tokens that are predicted
Scores = NDArray[np.float32]
Experts = NDArray[np.uint16]


class Predictor(Protocol):
    """Says which experts tokens will choose, from what the tokens before them chose."""

    @property
    def name(self) -> str: ...

    @property
    def horizons(self) -> tuple[int, ...]:
        """How many tokens ahead it predicts: 1 to AHEAD, or 0 for a token's next layer from its
        present one."""

    def scores(self, command: CommandTrace) -> Scores:
        """float32 [tokens, horizons, layers, experts]: after each token, the more likely an
        expert, the higher, whatever its layer. A token's row depends on no later token; with
        horizon 0, a layer's on no later layer either, nor on itself (the first layer's are not
        used)."""


def multi_hot(ids: NDArray[np.integer], experts: int) -> Scores:
    """float32 [..., experts]: 1 for those in ids [..., top_k], else 0."""
    hot = np.zeros((*ids.shape[:-1], experts), np.float32)
    np.put_along_axis(hot, ids.astype(np.int64), 1.0, axis=-1)
    return hot


def best(scores: Scores, count: int) -> Experts:
    """The `count` experts with the highest scores, best first, ties to the lower id:
    [..., experts] -> uint16 [..., count]."""
    return np.argsort(-scores, axis=-1, kind="stable")[..., :count].astype(np.uint16)


def repeated(scores: Scores) -> Scores:
    """The same [tokens, layers, experts] for every one of AHEAD tokens."""
    return np.repeat(scores[:, None], AHEAD, axis=1)
