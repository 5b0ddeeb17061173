"""Is anybody else at work on this machine? Measured before and while something is timed."""

from __future__ import annotations

import os
import time
from pathlib import Path

FOREIGN_LIMIT = 0.12  # cores that others may use while something is timed
_STAT = Path("/proc/stat")
_TICK = 1 / os.sysconf("SC_CLK_TCK")
_WINDOW_SECONDS = 0.3


def busy_seconds() -> float:
    """CPU seconds that all processes together have used since the machine started."""
    user, nice, system, _idle, _waiting, irq, softirq = map(int, _STAT.read_text().split()[1:8])
    return (user + nice + system + irq + softirq) * _TICK


class ForeignLoad:
    """What others use of the machine from now on."""

    def __init__(self) -> None:
        self._busy = busy_seconds()
        self._own = time.process_time()
        self._start = time.perf_counter()

    def cores(self, own_seconds: float = 0.0) -> float:
        """Cores that others used on average; `own_seconds` is CPU of measured processes.

        The system counts in ticks of 10 ms, so one or two of them say nothing.
        """
        wall = time.perf_counter() - self._start
        own = own_seconds + time.process_time() - self._own
        foreign = busy_seconds() - self._busy - own - 2 * _TICK
        return max(0.0, foreign) / wall


def wait_until_quiet(patience_seconds: float) -> bool:
    """Waits until others use less than FOREIGN_LIMIT; False when that did not happen in time."""
    deadline = time.perf_counter() + patience_seconds
    while time.perf_counter() < deadline:
        load = ForeignLoad()
        time.sleep(_WINDOW_SECONDS)
        if load.cores() <= FOREIGN_LIMIT:
            return True
    return False
