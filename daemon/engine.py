"""Runs requests on a model: queue, slots, scheduling.

One worker thread owns the model. In every round each active slot gets one prefill chunk or one
decode step, so no stream waits longer than the others' chunks. Events travel to the event loop that
submitted the request.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from dataclasses import dataclass
from types import TracebackType

from emberd.daemon import prefix_cache
from emberd.daemon.core import LogitsRole
from emberd.daemon.errors import EmberdError
from emberd.daemon.generation import Event, Finish, Generation, Request, Usage
from emberd.daemon.metrics import Metrics
from emberd.daemon.prefix_cache import Slot
from emberd.daemon.protocols import ModelLike
from emberd.daemon.text import Tokenizer

SHARED_CHUNK = 32  # largest prefill chunk while other requests are being answered

log = logging.getLogger("emberd")


class QueueFull(EmberdError):  # noqa: N818
    """As many requests wait as may."""


class ContextLengthExceeded(EmberdError):  # noqa: N818
    """The prompt and the tokens asked for do not fit a slot."""


class GenerationFailed(EmberdError):  # noqa: N818
    """The model failed while answering; the daemon goes on."""


@dataclass(frozen=True)
class Load:
    """How busy the engine is."""

    slots: int
    busy: int
    queued: int
    max_queue: int


class Stream:
    """The events of one request: iterate it, and leave its context to cancel what remains."""

    def __init__(self, engine: Engine, request: Request) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event | Exception | None] = asyncio.Queue()
        self.request = request
        self.cancelled = False
        self.submitted = time.monotonic()
        self.usage = Usage(len(request.prompt))
        """Counts so far; final when the iteration has ended."""

    def put(self, event: Event | Exception | None) -> None:
        """Called from the worker; None ends the stream."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Event:
        event = await self._events.get()
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
        self._engine.cancel(self)


class _Job:
    """A stream at work in a slot."""

    def __init__(self, stream: Stream, slot: Slot, reused: int, tokenizer: Tokenizer) -> None:
        self.stream = stream
        self.slot = slot
        request = stream.request
        self._tokenizer = tokenizer
        self._boundaries = {
            request.boundary,
            prefix_cache.common_prefix(slot.tokens, request.prompt),
        }
        if request.choices > 1 or request.boundary is None:
            self._boundaries.add(len(request.prompt) - 1)
        slot.go_back(reused)
        if reused in self._boundaries and request.choices > 1:
            slot.save()
        stream.usage.cached_tokens = reused
        self._generation = Generation(request, 0, tokenizer)
        self._last_token = 0.0

    def advance(self, sizes: tuple[int, ...], max_chunk: int, metrics: Metrics) -> bool:
        """One prefill chunk or one decode step; True when the request is complete."""
        slot, prompt = self.slot, self.stream.request.prompt
        position = len(slot.tokens)
        if position >= len(prompt):
            view = slot.step([self._generation.token], LogitsRole.LAST)
        else:
            ends = [end for end in self._boundaries if end is not None and end > position]
            room = min([*ends, len(prompt), position + max_chunk]) - position
            size = max(size for size in sizes if size <= room)
            last = position + size == len(prompt)
            role = LogitsRole.LAST if last else LogitsRole.NONE
            view = slot.step(prompt[position : position + size], role)
            if position + size in self._boundaries:
                slot.save()
            if not last:
                return False
        assert view is not None
        event = self._generation.accept(view)
        self._count(metrics)
        if event:
            self.stream.put(event)
        if self._generation.finish is None:
            return False
        self.stream.put(Finish(self._generation.choice, self._generation.finish))
        return self._next_choice()

    def _next_choice(self) -> bool:
        """Go back to the end of the prompt for the next choice; True if that was the last."""
        request, choice = self.stream.request, self._generation.choice + 1
        if choice == request.choices:
            return True
        self.slot.go_back(len(request.prompt) - 1)
        self._generation = Generation(request, choice, self._tokenizer)
        self._last_token = 0.0
        return False

    def _count(self, metrics: Metrics) -> None:
        now = time.monotonic()
        usage = self.stream.usage
        if usage.completion_tokens == 0:
            metrics.time_to_first_token.observe(now - self.stream.submitted)
            metrics.prompt_tokens += usage.prompt_tokens
            metrics.cached_tokens += usage.cached_tokens
        if self._last_token:
            metrics.time_per_token.observe(now - self._last_token)
        self._last_token = now
        metrics.generated_tokens += 1
        usage.completion_tokens += 1
        usage.reasoning_tokens += self._generation.last_was_reasoning


class Engine:
    """Answers requests with a model.

    Args:
        slots: sessions, and requests at work, at a time.
        context: tokens per session.
        max_queue: requests that may wait.
    """

    def __init__(
        self,
        model: ModelLike,
        tokenizer: Tokenizer,
        *,
        slots: int,
        context: int,
        max_queue: int,
        metrics: Metrics | None = None,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self.context = context
        self.metrics = metrics or Metrics()
        self._max_queue = max_queue
        self._slots = [Slot(model.open_session(context)) for _ in range(slots)]
        self._idle = list(self._slots)
        self._queue: deque[Stream] = deque()
        self._jobs: list[_Job] = []
        self._changed = threading.Condition()
        self._closing = False
        self._worker = threading.Thread(target=self._work, name="engine", daemon=True)
        self._worker.start()

    @property
    def vocab_size(self) -> int:
        return self._model.vocab_size

    @property
    def load(self) -> Load:
        return Load(len(self._slots), len(self._jobs), len(self._queue), self._max_queue)

    def submit(self, request: Request) -> Stream:
        """Queue a request. Raises ContextLengthExceeded or QueueFull."""
        asked = max(request.max_tokens, 1)
        if len(request.prompt) + asked > self.context:
            raise ContextLengthExceeded(
                f"the prompt has {len(request.prompt)} tokens and {asked} are to be generated: "
                f"{len(request.prompt) + asked} together, but the context is {self.context} tokens"
            )
        stream = Stream(self, request)
        with self._changed:
            waiting = len(self._queue) - max(0, len(self._idle))
            if waiting >= self._max_queue:
                raise QueueFull(f"{len(self._queue)} requests are waiting already; try again later")
            self._queue.append(stream)
            self._changed.notify()
        return stream

    def cancel(self, stream: Stream) -> None:
        """Give up a request; without effect on a complete one."""
        with self._changed:
            stream.cancelled = True
            if stream in self._queue:
                self._queue.remove(stream)
            self._changed.notify()

    def close(self) -> None:
        """Stop the worker, then free the sessions and the model."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._worker.join()
        for slot in self._slots:
            slot.close()
        self._model.close()

    def _work(self) -> None:
        while self._assign():
            for job in list(self._jobs):
                if job.stream.cancelled or self._step(job):
                    self._release(job)

    def _assign(self) -> bool:
        """Give waiting requests to idle slots; False when the engine closes."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._queue or self._jobs)
            if self._closing:
                return False
            while self._queue and self._idle:
                stream = self._queue.popleft()
                slot, reused = prefix_cache.choose(self._idle, stream.request.prompt)
                try:
                    job = _Job(stream, slot, reused, self._tokenizer)
                except EmberdError as error:
                    slot.reset()
                    stream.put(GenerationFailed(f"the model failed: {error}"))
                    continue
                self._idle.remove(slot)
                self._jobs.append(job)
        return True

    def _step(self, job: _Job) -> bool:
        """Advance a job; True when it is over, well or not."""
        sizes = self._model.chunk_sizes
        max_chunk = SHARED_CHUNK if len(self._jobs) > 1 else max(sizes)
        try:
            done = job.advance(sizes, max(max_chunk, min(sizes)), self.metrics)
        except Exception as error:
            log.error("a request failed: %s", error, exc_info=not isinstance(error, EmberdError))
            job.slot.reset()
            job.stream.put(GenerationFailed(f"the model failed: {error}"))
            return True
        if done:
            job.stream.put(None)
        return done

    def _release(self, job: _Job) -> None:
        with self._changed:
            self._jobs.remove(job)
            self._idle.append(job.slot)
