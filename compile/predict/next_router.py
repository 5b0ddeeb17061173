"""Tokens choose what the router of the next layer makes of the present layer's hidden state."""

from __future__ import annotations

import numpy as np
from emberd.compile.predict.predictor import Scores
from emberd.compile.residency.trace import CommandTrace, TraceHeader


class NextRouter:
    """Scores an expert by its place among those that a trace has noted as expected; for generated
    tokens only."""

    name = "next-router"
    horizons = (0,)

    def __init__(self, header: TraceHeader) -> None:
        self._header = header

    def scores(self, command: CommandTrace) -> Scores:
        """See Predictor."""
        header = self._header
        scores = np.zeros((len(command.ids), 1, header.layers, header.experts), np.float32)
        if command.next_layer is not None:
            places = np.arange(header.next_layer, 0, -1, dtype=np.float32)
            expected = command.next_layer.astype(np.int64)
            generated = scores[command.prompt :, 0, 1:]
            np.put_along_axis(generated, expected, np.broadcast_to(places, expected.shape), -1)
        return scores
