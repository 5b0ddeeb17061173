"""Results come in order, few at a time, and errors in their turn."""

import os
import threading
from collections.abc import Iterator

import pytest
from emberd.compile.parallel import in_order


def test_results_are_in_the_order_of_the_items() -> None:
    second_is_done = threading.Event()

    def function(item: int) -> int:
        if item == 0 and len(os.sched_getaffinity(0)) > 1:
            assert second_is_done.wait(10)
        if item == 1:
            second_is_done.set()
        return item * item

    assert list(in_order(function, range(50))) == [item * item for item in range(50)]


def test_items_are_taken_only_as_results_are() -> None:
    taken: list[int] = []

    def items() -> Iterator[int]:
        for item in range(1000):
            taken.append(item)
            yield item

    for result in in_order(lambda item: item, items()):
        assert len(taken) <= result + len(os.sched_getaffinity(0)) + 1


def test_an_error_comes_in_its_turn() -> None:
    def function(item: int) -> int:
        if item == 3:
            raise ValueError("the third")
        return item

    results = in_order(function, range(10))
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="the third"):
        next(results)
