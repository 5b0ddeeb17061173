"""Calls from the engine's thread into an event loop, which do not stop the engine.

`call_soon_threadsafe` wakes the loop by a system call during which Python's lock is free: the loop
takes it, and the engine, which was about to start the next step, waits until it gets it back. A
mailbox keeps the lock; the loop gets it when the engine's step runs in the core.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections import deque
from collections.abc import Callable
from weakref import WeakKeyDictionary

_signal = ctypes.PyDLL(None).eventfd_write  # PyDLL: without releasing the lock
_signal.argtypes, _signal.restype = (ctypes.c_int, ctypes.c_uint64), ctypes.c_int


class Mailbox:
    """Of an event loop, in whose thread it is made; see `of_running_loop`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._calls: deque[Callable[[], object]] = deque()
        self._woken = False  # and has not looked for calls since
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        loop.add_reader(self._event, self._deliver)

    def call(self, function: Callable[[], object]) -> None:
        """Has the loop call a function, in the order of calls; from any thread. Without effect
        once the loop is closed. The function must not raise."""
        self._calls.append(function)
        if not self._woken:
            self._woken = True
            _signal(self._event, 1)

    def _deliver(self) -> None:
        os.eventfd_read(self._event)
        self._woken = False
        while self._calls:
            self._calls.popleft()()

    def __del__(self) -> None:
        os.close(self._event)


_mailboxes: WeakKeyDictionary[asyncio.AbstractEventLoop, Mailbox] = WeakKeyDictionary()


def of_running_loop() -> Mailbox:
    """The mailbox of the running loop, which closes with it."""
    loop = asyncio.get_running_loop()
    mailbox = _mailboxes.get(loop)
    if mailbox is None:
        mailbox = _mailboxes[loop] = Mailbox(loop)
    return mailbox
