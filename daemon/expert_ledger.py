"""What a served model's experts have cost, by class of command and minute by minute.

The core counts by layer. What it counted from one call of `ExpertLedger.count` to the next is
added to one class, and to the minute of the call: nothing is done between two calls."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from emberd.daemon.bindings import ExpertCounters

MINUTES = 60  # that are kept


@dataclass(frozen=True)
class Minute:
    """One in which steps asked for experts: when it began (Unix time in seconds), and how many of
    them steps found in memory (hits) or had to wait for (misses)."""

    start: int
    hits: int
    misses: int


class ExpertLedger:
    """Adds up counters over the models that are opened one after the other. May be read while it
    is added to.

    `classes`: the names of the activation map's.
    """

    def __init__(self, classes: Sequence[str]) -> None:
        self._lock = threading.Lock()
        self._names = (*classes, None)
        self._totals = [ExpertCounters() for _ in self._names]
        self._minutes: deque[Minute] = deque(maxlen=MINUTES)
        self._before = ExpertCounters()

    def opened(self) -> None:
        """A model was opened: it counts from zero."""
        self._before = ExpertCounters()

    def count(
        self, layers: Sequence[ExpertCounters], command_class: int | None, now: float
    ) -> None:
        """Adds what the open model counted since the last call, to a class (None: to none of them)
        and to the minute of `now` (Unix time in seconds)."""
        counted, new = _total(layers), ExpertCounters()
        _add(new, counted, 1)
        _add(new, self._before, -1)
        self._before = counted
        with self._lock:
            _add(self._totals[-1 if command_class is None else command_class], new, 1)
            if new.hits + new.misses == 0:
                return
            minute = Minute(int(now // 60) * 60, new.hits, new.misses)
            if self._minutes and self._minutes[-1].start == minute.start:
                last = self._minutes.pop()
                minute = Minute(last.start, last.hits + new.hits, last.misses + new.misses)
            self._minutes.append(minute)

    def by_class(self) -> list[tuple[str | None, ExpertCounters]]:
        """The counters of each class, the last being of what was added to none."""
        with self._lock:
            copies = [ExpertCounters.from_buffer_copy(total) for total in self._totals]
        return list(zip(self._names, copies, strict=True))

    def minutes(self) -> list[Minute]:
        """The last MINUTES in which steps asked for experts, oldest first."""
        with self._lock:
            return list(self._minutes)


def _total(layers: Sequence[ExpertCounters]) -> ExpertCounters:
    total = ExpertCounters()
    for counters in layers:
        _add(total, counters, 1)
    return total


def _add(total: ExpertCounters, counters: ExpertCounters, sign: int) -> None:
    for name, *_ in ExpertCounters._fields_:
        setattr(total, name, getattr(total, name) + sign * getattr(counters, name))
