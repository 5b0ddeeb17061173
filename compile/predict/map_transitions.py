"""Tokens choose what the map says followed the experts of the token, or layer, before."""

from __future__ import annotations

import numpy as np
from emberd.compile.predict.predictor import AHEAD, Scores, multi_hot
from emberd.compile.residency.trace import CommandTrace
from emberd.daemon.activation_map import SHARE_UNIT, SUCCESSORS, ActivationMap, Transitions
from numpy.typing import NDArray

_LEAST = np.float32(1e-3)  # of the experts' mass, which decides where no transition does


class TokenTransitions:
    """From each expert to those of the same layer that the next token chose; for later tokens the
    transitions are applied again to what they expect of the next."""

    name = "token-transitions"
    horizons = tuple(range(1, AHEAD + 1))

    def __init__(self, found: ActivationMap) -> None:
        self._top_k = found.top_k
        self._matrices = matrices(found.next_token, found.layers)
        self._rest = _LEAST * _mass(found)

    def scores(self, command: CommandTrace) -> Scores:
        """See Predictor."""
        expected = multi_hot(command.ids, self._rest.shape[-1])
        ahead = []
        for _ in range(AHEAD):
            # Every one of the top_k experts expects top_k: their mean is how many tokens choose it.
            expected = np.einsum("tle,lef->tlf", expected, self._matrices) / self._top_k
            ahead.append(expected + self._rest)
        return np.stack(ahead, axis=1)


class LayerTransitions:
    """From each expert to those of the next layer that the same token chose."""

    name = "layer-transitions"
    horizons = (0,)

    def __init__(self, found: ActivationMap) -> None:
        self._matrices = matrices(found.next_layer, found.layers)
        self._rest = _LEAST * _mass(found)

    def scores(self, command: CommandTrace) -> Scores:
        """See Predictor."""
        chosen = multi_hot(command.ids, self._rest.shape[-1])
        scores = np.broadcast_to(self._rest, chosen.shape).copy()
        scores[:, 1:] += np.einsum("tle,lef->tlf", chosen[:, :-1], self._matrices[:-1])
        return scores[:, None]


def matrices(transitions: Transitions, layers: int) -> NDArray[np.float32]:
    """float32 [layers, experts, experts]: how often the second followed the first."""
    shape = layers, transitions.experts, SUCCESSORS
    successors = np.array(transitions.successors, np.int64).reshape(shape)
    shares = np.array(transitions.shares, np.float32).reshape(shape) / SHARE_UNIT
    found = np.zeros((layers, transitions.experts, transitions.experts), np.float32)
    layer, expert = np.arange(layers)[:, None, None], np.arange(transitions.experts)[:, None]
    np.add.at(found, (layer, expert, successors), shares)
    return found


def _mass(found: ActivationMap) -> NDArray[np.float32]:
    return np.array([found.mass(layer) for layer in range(found.layers)], np.float32)
