"""Tokens choose what commands of their class choose most, whatever came before."""

from __future__ import annotations

import numpy as np
from emberd.compile.predict.predictor import AHEAD, Scores, repeated
from emberd.compile.residency.trace import CommandTrace
from emberd.daemon.activation_map import ActivationMap


class MapRanking:
    """Scores an expert by its share of the choices of the command's class; of any command where
    the map has not that class."""

    name = "map-ranking"
    horizons = tuple(range(1, AHEAD + 1))

    def __init__(self, found: ActivationMap) -> None:
        self._map = found
        self._classes = [entry.name for entry in found.classes]

    def scores(self, command: CommandTrace) -> Scores:
        """See Predictor."""
        known = command.command_class in self._classes
        index = self._classes.index(command.command_class) if known else None
        mass = [self._map.mass(layer, index) for layer in range(self._map.layers)]
        every = np.broadcast_to(np.array(mass, np.float32), (len(command.ids), *np.shape(mass)))
        return repeated(every)
