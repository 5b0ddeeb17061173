"""The events of one request, on their way from the engine's thread to an event loop."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType

from emberd.daemon import mailbox
from emberd.daemon.generation import Event, Request, Usage


class Stream:
    """Iterate it for the events; leave its context to cancel what remains.

    Args:
        cancel: called with the stream when its context is left.
    """

    def __init__(self, request: Request, cancel: Callable[[Stream], None]) -> None:
        self._cancel = cancel
        self._loop = asyncio.get_running_loop()
        self._mailbox = mailbox.of_running_loop()
        self._events: deque[Event | Exception | None] = deque()
        self._awaited: asyncio.Future[None] | None = None  # done when there are events
        self.request = request
        self.cancelled = False
        self.submitted = time.monotonic()
        self.usage = Usage(len(request.prompt))
        """Counts so far; final when the iteration has ended."""

    def put(self, event: Event | Exception | None) -> None:
        """Called from the engine's thread; None ends the stream."""
        self._events.append(event)
        self._mailbox.call(self._arrived)

    def _arrived(self) -> None:
        if self._awaited is not None and not self._awaited.done():
            self._awaited.set_result(None)

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Event:
        while not self._events:
            self._awaited = self._loop.create_future()
            await self._awaited
        event = self._events.popleft()
        if event is None:
            raise StopAsyncIteration
        if isinstance(event, Exception):
            raise event
        return event

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._cancel(self)
