"""The next tokens choose what was chosen most often of late."""

from __future__ import annotations

import numpy as np
from emberd.compile.predict.predictor import AHEAD, Scores, multi_hot, repeated
from emberd.compile.residency.trace import CommandTrace, TraceHeader
from emberd.daemon.expert_predictor import WINDOW


class Window:
    """Scores an expert by how many of the last WINDOW tokens chose it."""

    name = "window"
    horizons = tuple(range(1, AHEAD + 1))

    def __init__(self, header: TraceHeader) -> None:
        self._experts = header.experts

    def scores(self, command: CommandTrace) -> Scores:
        """See Predictor."""
        sums = np.cumsum(multi_hot(command.ids, self._experts), axis=0)
        sums[WINDOW:] -= sums[:-WINDOW].copy()
        return repeated(sums)
