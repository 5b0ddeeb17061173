"""Work spread over the CPUs whose results are taken in order."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_order(function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """function(item) of every item, computed by a thread per CPU, which must release the GIL.

    However many the items are, there are never more results in memory than CPUs, and one. Raises
    what the function raises, in its turn.
    """
    threads = len(os.sched_getaffinity(0))
    pending: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for item in items:
            pending.append(pool.submit(function, item))
            if len(pending) > threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
