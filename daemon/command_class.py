"""Which class of the activation map a command is of, told by the experts that its tokens choose."""

from __future__ import annotations

import math
from collections.abc import Sequence

from emberd.daemon.activation_map import ActivationMap

_UNSEEN = 1e-4  # share of the choices that an expert is given which a class never chose
_LEAD = math.log(1000)  # of the likeliest class over the next, where it is clear


class ClassEvidence:
    """Naive Bayes over the choices of the map's classes, with their priors, layer by layer."""

    def __init__(self, activation_map: ActivationMap) -> None:
        self._map = activation_map
        self._likelihoods = [math.log(prior) for prior in activation_map.priors]
        self._evenly = min(self._likelihoods)  # of tokens that choose all experts alike

    def add(self, layer: int, chosen: Sequence[int]) -> None:
        """Takes note of how many tokens chose each of the layer's experts, [experts]."""
        counts = [(expert, count) for expert, count in enumerate(chosen) if count]
        for index in range(len(self._likelihoods)):
            mass = self._map.mass(layer, index)
            for expert, count in counts:
                self._likelihoods[index] += count * math.log(mass[expert] + _UNSEEN)
        self._evenly -= sum(count for _, count in counts) * math.log(self._map.experts)

    def likeliest(self) -> int | None:
        """None: tokens that choose all experts alike, as likely as those of the rarest class,
        explain the choices better than any class does."""
        best = max(self._likelihoods)
        return self._likelihoods.index(best) if best >= self._evenly else None

    def clearest(self) -> int | None:
        """The likeliest class where it is far likelier than all others, so that what is still to
        come will hardly tell another."""
        *_, second, first = sorted([self._evenly, *self._likelihoods])
        return self.likeliest() if first - second >= _LEAD else None


def likeliest_class(activation_map: ActivationMap, chosen: Sequence[int]) -> int | None:
    """The class that tokens are likeliest of which chose each expert so often, [layers * experts];
    None if it is like none."""
    evidence, experts = ClassEvidence(activation_map), activation_map.experts
    for layer in range(activation_map.layers):
        evidence.add(layer, chosen[layer * experts : (layer + 1) * experts])
    return evidence.likeliest()
