"""Which of a served model's experts are in memory: how many bytes of them, and which come first.

With a budget and an activation map, the experts that commands choose most are read as soon as the
model is opened; when a prompt has been read, those of the class that its routing looks like. Such
reads give way to those that a step waits for."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Sequence

from emberd.daemon.activation_map import ActivationMap
from emberd.daemon.artifact import Artifact
from emberd.daemon.bindings import ExpertCounters
from emberd.daemon.core import Model
from emberd.daemon.errors import EmberdError

_UNSEEN = 1e-4  # share of the choices that an expert is given which a class never chose


class Residency:
    """Opens the models of an artifact, one after the other, with the same budget for experts.

    Attributes: `budget` (bytes; None: all experts are mapped).
    """

    def __init__(
        self,
        budget: int | None,
        reader_threads: int,
        activation_map: ActivationMap | None = None,
    ) -> None:
        self.budget = budget
        self._reader_threads = reader_threads
        self._map = activation_map
        self._counted: Sequence[int] = ()  # choices of each expert when a prompt was last read
        self._lock = threading.Lock()
        self._least = 0  # budget of a step, in bytes, once a model has been opened
        self._model: weakref.ref[Model] | None = None

    def open(self, artifact: Artifact, threads: int | None) -> Model:
        """Opens the model. Raises EmberdError."""
        with self._lock:
            model = Model(artifact, threads, self.budget, self._reader_threads)
            self._model = weakref.ref(model)
            self._least = model.least_expert_budget
            self._counted = model.chosen_experts()
        self._warm(model, None)
        return model

    def prompt_read(self) -> None:
        """Warms the experts of the class that the tokens since the last call are likeliest of."""
        model = self._opened()
        if model is None or self._map is None or self.budget is None:
            return
        chosen = model.chosen_experts()
        news = [now - before for now, before in zip(chosen, self._counted, strict=True)]
        self._counted = chosen
        self._warm(model, likeliest_class(self._map, news))

    def set_budget(self, budget: int | None) -> None:
        """Changes the budget of the open model, after the step that it is at, and of later ones.

        Raises EmberdError for a budget that is too small; it is then as before.
        """
        with self._lock:
            model = self._opened()
            if model is not None:
                try:
                    model.set_expert_budget(budget)
                except EmberdError:
                    if not model.closed:
                        raise
            if budget is not None and budget < self._least:  # the next model could not be opened
                raise EmberdError(
                    f"an expert budget of {budget} bytes: a step needs {self._least} bytes at once"
                )
            self.budget = budget

    def counters(self) -> list[ExpertCounters]:
        """What the experts of each layer have cost since the model was opened; empty before."""
        model = self._opened()
        return [] if model is None else model.expert_counters()

    def _warm(self, model: Model, command_class: int | None) -> None:
        """Has the experts read that the class chooses most, as many as fit: those that it chooses
        more often than the average, as to guess the others delays the reads that are needed."""
        if self._map is not None and self.budget is not None:
            slots = self.budget // model.experts.expert_bytes
            average = 1 / model.experts.experts
            model.warm_experts(
                [
                    (layer, expert)
                    for layer, expert in self._map.hottest(slots, command_class)
                    if self._map.mass(layer, command_class)[expert] > average
                ]
            )

    def _opened(self) -> Model | None:
        return None if self._model is None else self._model()


def likeliest_class(activation_map: ActivationMap, chosen: Sequence[int]) -> int:
    """The class that tokens are likeliest of which chose each expert so often, [layers * experts]:
    naive Bayes over the choices of the map's classes, with their priors."""

    def likelihood(command_class: int) -> float:
        total = math.log(activation_map.priors[command_class])
        for layer in range(activation_map.layers):
            start = layer * activation_map.experts
            row = chosen[start : start + activation_map.experts]
            for count, share in zip(row, activation_map.mass(layer, command_class), strict=True):
                if count:
                    total += count * math.log(share + _UNSEEN)
        return total

    return max(range(len(activation_map.classes)), key=likelihood)
