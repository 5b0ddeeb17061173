"""How much memory a served model's experts may take: changed as it runs, kept as it sleeps."""

from __future__ import annotations

import threading
import weakref

from emberd.daemon.artifact import Artifact
from emberd.daemon.bindings import ExpertCounters
from emberd.daemon.core import Model
from emberd.daemon.errors import EmberdError


class Residency:
    """Opens the models of an artifact, one after the other, with the same budget for experts.

    Attributes: `budget` (bytes; None: all experts are mapped).
    """

    def __init__(self, budget: int | None, reader_threads: int) -> None:
        self.budget = budget
        self._reader_threads = reader_threads
        self._lock = threading.Lock()
        self._model: weakref.ref[Model] | None = None

    def open(self, artifact: Artifact, threads: int | None) -> Model:
        """Opens the model. Raises EmberdError."""
        with self._lock:
            model = Model(artifact, threads, self.budget, self._reader_threads)
            self._model = weakref.ref(model)
            return model

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
            self.budget = budget

    def counters(self) -> list[ExpertCounters]:
        """What the experts of each layer have cost since the model was opened; empty before."""
        model = self._opened()
        return [] if model is None else model.expert_counters()

    def _opened(self) -> Model | None:
        return None if self._model is None else self._model()
