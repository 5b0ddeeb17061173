"""Calls into an event loop from another thread."""

from __future__ import annotations

import asyncio
import gc
import threading
from functools import partial
from pathlib import Path

import pytest
from emberd.daemon import mailbox


def test_calls_come_in_order_and_in_the_loop() -> None:
    called: list[tuple[int, int]] = []

    async def run() -> None:
        box, done = mailbox.of_running_loop(), asyncio.Event()
        assert mailbox.of_running_loop() is box

        def note(number: int) -> None:
            called.append((number, threading.get_ident()))
            if number == 99:
                done.set()

        sender = threading.Thread(target=lambda: [box.call(partial(note, i)) for i in range(100)])
        sender.start()
        await done.wait()
        sender.join()

    asyncio.run(run())
    assert called == [(i, threading.get_ident()) for i in range(100)]


def test_a_loop_is_woken_once_for_what_it_has_yet_to_take(monkeypatch: pytest.MonkeyPatch) -> None:
    wake = mailbox._signal
    wakes, called = list[tuple[int, int]](), list[int]()

    def counted(event: int, value: int) -> None:
        wakes.append((event, value))
        wake(event, value)

    async def run() -> None:
        box = mailbox.of_running_loop()
        for turn in range(3):
            for number in range(5):
                box.call(partial(called.append, number))
            while len(called) < 5 * (turn + 1):
                await asyncio.sleep(0)

    monkeypatch.setattr(mailbox, "_signal", counted)
    asyncio.run(run())
    assert called == [*range(5)] * 3 and len(wakes) == 3


def _events() -> int:
    """How many event descriptors this process has open."""
    folder = Path("/proc/self/fd")
    links = (str(entry.readlink()) for entry in folder.iterdir() if entry.is_symlink())
    return sum("[eventfd]" in link for link in links)


def test_a_mailbox_closes_with_its_loop() -> None:
    async def run() -> mailbox.Mailbox:
        return mailbox.of_running_loop()

    gc.collect()  # mailboxes of other tests
    before = _events()
    box, called = asyncio.run(run()), list[int]()
    box.call(partial(called.append, 1))
    assert _events() == before + 1
    del box
    gc.collect()
    assert _events() == before and not called
