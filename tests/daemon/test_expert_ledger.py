"""Counters become costs of classes and of minutes."""

from __future__ import annotations

from emberd.daemon.bindings import ExpertCounters
from emberd.daemon.expert_ledger import MINUTES, ExpertLedger, Minute


def layers(hits: int, misses: int) -> list[ExpertCounters]:
    """Of two layers, with other counts that go along."""
    return [
        ExpertCounters(hits=hits - 1, misses=misses, bytes=10 * misses),
        ExpertCounters(hits=1, stall_nanoseconds=5 * misses),
    ]


def told(ledger: ExpertLedger) -> dict[str | None, tuple[int, int, int, int]]:
    return {
        costs.name: (
            costs.total.hits,
            costs.total.misses,
            costs.total.bytes,
            costs.total.stall_nanoseconds,
        )
        for costs in ledger.by_class()
    }


def test_what_is_new_counts_for_the_class() -> None:
    ledger = ExpertLedger(["a", "b"])
    ledger.count(layers(5, 2), 1, 0.0)
    ledger.count(layers(9, 3), 0, 0.0)
    ledger.count(layers(10, 7), 1, 0.0)
    ledger.count(layers(11, 7), None, 0.0)
    assert told(ledger) == {"a": (4, 1, 10, 5), "b": (6, 6, 60, 30), None: (1, 0, 0, 0)}


def test_layers_of_a_class_add_up_apart() -> None:
    ledger = ExpertLedger(["a"])
    assert [costs.layers for costs in ledger.by_class()] == [(), ()]
    for _ in range(2):
        ledger.opened()
        ledger.count(layers(5, 2), 0, 0.0)
        ledger.count(layers(6, 4), None, 0.0)
    of_class, of_none = ledger.by_class()
    assert [(c.hits, c.misses, c.bytes) for c in of_class.layers] == [(8, 4, 40), (2, 0, 0)]
    assert [(c.hits, c.misses, c.bytes) for c in of_none.layers] == [(2, 4, 40), (0, 0, 0)]


def test_every_model_counts_from_zero() -> None:
    ledger = ExpertLedger([])
    for _ in range(2):
        ledger.opened()
        ledger.count(layers(5, 2), None, 0.0)
    assert told(ledger) == {None: (10, 4, 40, 20)}


def test_minutes_in_which_nothing_was_asked_for_are_left_out() -> None:
    ledger = ExpertLedger([])
    ledger.count(layers(5, 2), None, 59.9)
    ledger.count(layers(5, 2), None, 60.0)
    ledger.count(layers(6, 2), None, 180.0)
    ledger.count(layers(6, 9), None, 239.9)
    assert ledger.minutes() == [Minute(0, 5, 2), Minute(180, 1, 7)]


def test_what_was_read_ahead_counts_in_no_minute() -> None:
    ledger = ExpertLedger([])
    ledger.count([ExpertCounters(bytes=7)], None, 0.0)
    assert told(ledger) == {None: (0, 0, 7, 0)} and ledger.minutes() == []


def test_the_last_minutes_are_kept() -> None:
    ledger = ExpertLedger([])
    for minute in range(100):
        ledger.count(layers(minute + 1, 0), None, 60.0 * minute)
    assert [minute.start // 60 for minute in ledger.minutes()] == list(range(100 - MINUTES, 100))
