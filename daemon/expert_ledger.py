"""What a served model's experts have cost, by class of command and layer, and minute by minute.

The core counts by layer. What it counted from one call of `ExpertLedger.count` to the next is
added to one class, and to the minute of the call: nothing is done between two calls."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce

from emberd.daemon.bindings import ExpertCounters

MINUTES = 60  # that are kept
_FIELDS = [name for name, *_ in ExpertCounters._fields_]


@dataclass(frozen=True)
class Minute:
    """One in which steps asked for experts: when it began (Unix time in seconds), and how many of
    them steps found in memory (hits) or had to wait for (misses)."""

    start: int
    hits: int
    misses: int


@dataclass(frozen=True)
class ClassCosts:
    """What experts have cost in commands of a class (None: of no class): in all, and by layer, of
    which there are none before a model has counted."""

    name: str | None
    total: ExpertCounters
    layers: tuple[ExpertCounters, ...]


class ExpertLedger:
    """Adds up counters over the models that are opened one after the other. May be read while it
    is added to.

    `classes`: the names of the activation map's.
    """

    def __init__(self, classes: Sequence[str]) -> None:
        self._lock = threading.Lock()
        self._names = (*classes, None)
        self._costs: list[list[ExpertCounters]] = [[] for _ in self._names]  # by class, layer
        self._minutes: deque[Minute] = deque(maxlen=MINUTES)
        self._before: Sequence[ExpertCounters] = ()

    def opened(self) -> None:
        """A model was opened: it counts from zero."""
        self._before = ()

    def count(
        self, layers: Sequence[ExpertCounters], command_class: int | None, now: float
    ) -> None:
        """Adds what the open model counted since the last call, to a class (None: to none of them)
        and to the minute of `now` (Unix time in seconds)."""
        before = self._before or [ExpertCounters() for _ in layers]
        new = list(map(_minus, layers, before))
        self._before = layers
        total = _total(new)
        index = -1 if command_class is None else command_class
        with self._lock:
            costs = self._costs[index] or [ExpertCounters() for _ in layers]
            self._costs[index] = list(map(_plus, costs, new))
            if total.hits + total.misses == 0:
                return
            minute = Minute(int(now // 60) * 60, total.hits, total.misses)
            if self._minutes and self._minutes[-1].start == minute.start:
                last = self._minutes.pop()
                minute = Minute(last.start, last.hits + total.hits, last.misses + total.misses)
            self._minutes.append(minute)

    def by_class(self) -> list[ClassCosts]:
        """What each class's commands cost, the last being what was added to none."""
        with self._lock:
            costs = [tuple(layers) for layers in self._costs]
        pairs = zip(self._names, costs, strict=True)
        return [ClassCosts(name, _total(layers), layers) for name, layers in pairs]

    def minutes(self) -> list[Minute]:
        """The last MINUTES in which steps asked for experts, oldest first."""
        with self._lock:
            return list(self._minutes)


def _plus(first: ExpertCounters, second: ExpertCounters) -> ExpertCounters:
    return ExpertCounters(*(getattr(first, name) + getattr(second, name) for name in _FIELDS))


def _minus(first: ExpertCounters, second: ExpertCounters) -> ExpertCounters:
    return ExpertCounters(*(getattr(first, name) - getattr(second, name) for name in _FIELDS))


def _total(layers: Iterable[ExpertCounters]) -> ExpertCounters:
    return reduce(_plus, layers, ExpertCounters())
