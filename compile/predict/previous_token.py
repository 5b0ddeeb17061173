"""The next tokens choose what the previous ones chose, the latest first."""

from __future__ import annotations

import numpy as np
from emberd.compile.predict.predictor import AHEAD, Scores, multi_hot, repeated
from emberd.compile.residency.trace import CommandTrace, TraceHeader
from emberd.daemon.expert_predictor import WINDOW


class PreviousToken:
    """Scores an expert by how long ago it was chosen, up to WINDOW tokens; among those of one
    token, the heavier first."""

    name = "previous-token"
    horizons = tuple(range(1, AHEAD + 1))

    def __init__(self, header: TraceHeader) -> None:
        self._experts = header.experts

    def scores(self, command: CommandTrace) -> Scores:
        """See Predictor."""
        ids = command.ids
        tokens, _, top_k = ids.shape
        chosen = multi_hot(ids, self._experts)
        heavier = np.zeros_like(chosen)  # below 1: it decides only within a token
        order = np.broadcast_to(np.arange(top_k, 0, -1) / (top_k + 1), ids.shape)
        np.put_along_axis(heavier, ids.astype(np.int64), order.astype(np.float32), axis=-1)
        scores = np.zeros_like(chosen)
        for ago in range(min(WINDOW, tokens) - 1, -1, -1):
            there = chosen[: tokens - ago] > 0
            value = heavier[: tokens - ago] + np.float32(WINDOW - ago)
            scores[ago:] = np.where(there, value, scores[ago:])
        return repeated(scores)
