"""Runs requests on a model: queue, slots, scheduling, and whether the model is in memory.

One worker thread owns the model. A round is one chunk of one prompt, then one step that gives every
answer a token: no stream waits for more than one chunk between two tokens, and prompts take turns.
A model that nobody has wanted for a while is closed, and opened again for the next request.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from emberd.daemon import prefix_cache
from emberd.daemon.errors import EmberdError
from emberd.daemon.generation import Request
from emberd.daemon.job import Job
from emberd.daemon.machine import return_free_memory
from emberd.daemon.metrics import Metrics
from emberd.daemon.prefix_cache import Slot
from emberd.daemon.protocols import ModelLike, WatchableExperts
from emberd.daemon.stream import Stream
from emberd.daemon.text import Tokenizer

SHARED_CHUNK = 32  # largest prefill chunk while answers are being generated

log = logging.getLogger("emberd")


class QueueFull(EmberdError):  # noqa: N818
    """As many requests wait as may."""


class ContextLengthExceeded(EmberdError):  # noqa: N818
    """The prompt and the tokens asked for do not fit a slot."""


class GenerationFailed(EmberdError):  # noqa: N818
    """The model failed while answering; the daemon goes on."""


class EngineClosed(EmberdError):  # noqa: N818
    """The engine ended before the request did."""


@dataclass(frozen=True)
class Load:
    """How busy the engine is; ``tokens`` are those held in its slots."""

    loaded: bool
    slots: int
    busy: int
    queued: int
    max_queue: int
    tokens: int


class Engine:
    """Answers requests with a model.

    Args:
        open_model: opens the model, now and after every time that it was closed for being idle;
            what it raises now, the constructor raises.
        slots: sessions, and requests at work, at a time.
        context: tokens per session; None means what the model allows.
        max_queue: requests that may wait.
        keep_alive: seconds after which an idle model is closed, and forgets its conversations;
            negative means never.
        prompt_begins: called before the first step of every prompt.
        prompt_read: called after every prompt, before its answer goes on.
        at_rest: called when the last of the requests at work has ended, before it is told so, and
            when the model was closed.
    """

    def __init__(
        self,
        open_model: Callable[[], ModelLike],
        tokenizer: Tokenizer,
        *,
        slots: int,
        max_queue: int,
        context: int | None = None,
        keep_alive: float = -1.0,
        metrics: Metrics | None = None,
        prompt_begins: Callable[[], None] = lambda: None,
        prompt_read: Callable[[], None] = lambda: None,
        at_rest: Callable[[], None] = lambda: None,
    ) -> None:
        self._open_model = open_model
        self._prompt_begins = prompt_begins
        self._prompt_read = prompt_read
        self._at_rest = at_rest
        self._tokenizer = tokenizer
        self.metrics = metrics or Metrics()
        self._max_queue = max_queue
        self._keep_alive = keep_alive if keep_alive >= 0 else math.inf
        self._slot_count = slots
        self._slots: list[Slot] = []
        self._idle: list[Slot] = []
        self._queue: deque[Stream] = deque()
        self._jobs: list[Job] = []
        self._changed = threading.Condition()
        self._closing = False
        self._holders = 0  # requests on their way, which keep the model open
        self._wanted = False  # by one of them, since it was closed
        self._idle_since = 0.0
        self._model: ModelLike | None = None
        model = open_model()
        self.vocab_size = model.vocab_size
        self.context = min(context or model.max_context, model.max_context)
        self._take(model)
        self._worker = threading.Thread(target=self._work, name="engine", daemon=True)
        self._worker.start()

    @property
    def load(self) -> Load:
        return Load(
            loaded=self._model is not None,
            slots=self._slot_count,
            busy=len(self._jobs),
            queued=len(self._queue),
            max_queue=self._max_queue,
            tokens=sum(len(slot.tokens) for slot in self._slots),
        )

    @property
    def experts(self) -> WatchableExperts | None:
        """The model's experts, to be watched from any thread; None while it is not loaded, or if
        it does not tell."""
        model = self._model
        return model if isinstance(model, WatchableExperts) else None

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Opens the model, without waiting for it, and keeps it open inside the context.

        For a request from its first byte on: the model wakes while the request is read.
        """
        self.metrics.reached("request_taken")
        with self._changed:
            self._holders += 1
            self._wanted = True
            self._changed.notify()
        try:
            yield
        finally:
            with self._changed:
                self._holders -= 1
                self._idle_since = time.monotonic()
                self._changed.notify()

    def check(self, request: Request) -> None:
        """Raises ContextLengthExceeded for a request that no slot can hold."""
        prompt, asked = len(request.prompt), request.max_tokens
        if prompt + asked > self.context:
            self.metrics.requests["refused"] += 1
            raise ContextLengthExceeded(
                f"the prompt has {prompt} tokens and {asked} are to be generated: "
                f"{prompt + asked} together, but the context is {self.context} tokens"
            )

    def submit(self, request: Request, admitted: bool = False) -> Stream:
        """Queue a request; one that is ``admitted`` goes on with another, and always has a place.

        Raises ContextLengthExceeded, QueueFull or EngineClosed.
        """
        self.check(request)
        self.metrics.reached("prompt_tokenised")
        stream = Stream(request, self.cancel)
        with self._changed:
            if self._closing:
                raise EngineClosed("the daemon is shutting down")
            waiting = len(self._queue) + len(self._jobs) - self._slot_count
            if waiting >= self._max_queue and not admitted:
                self.metrics.requests["refused"] += 1
                raise QueueFull(f"{max(waiting, 0)} requests are waiting already; try again later")
            self._queue.append(stream)
            self._changed.notify()
        return stream

    def cancel(self, stream: Stream) -> None:
        """Give up a request; without effect on a complete one."""
        with self._changed:
            stream.cancelled = True
            if stream in self._queue:
                self._queue.remove(stream)
                self.metrics.requests["cancelled"] += 1
            self._changed.notify()

    def close(self) -> None:
        """Stop the worker, end what it was at, then free the sessions and the model. Idempotent."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._worker.join()
        for stream in (*(job.stream for job in self._jobs), *self._queue):
            stream.put(EngineClosed("the daemon is shutting down"))
        self._jobs.clear()
        self._queue.clear()
        self._unload()

    def _work(self) -> None:
        while step := self._next():
            step()

    def _next(self) -> Callable[[], None] | None:
        """Waits until there is something to do; None when the engine closes."""
        if self._jobs and not self._closing:
            return self._round
        with self._changed:
            while not self._closing:
                if self._queue:
                    return self._wake if self._model is None else self._round
                if self._wanted:
                    return self._wake
                left = math.inf
                if self._model is not None and self._holders == 0:
                    left = self._idle_since + self._keep_alive - time.monotonic()
                if left <= 0:
                    return self._unload
                self._changed.wait(None if left == math.inf else min(left, threading.TIMEOUT_MAX))
        return None

    def _wake(self) -> None:
        """Open the model if it is closed; if that fails, so do the requests that wait for it."""
        self._wanted = False
        if self._model is not None:
            return
        began = time.monotonic()
        try:
            self._take(self._open_model())
        except Exception as error:
            log.error("the model cannot be opened: %s", error, exc_info=_unforeseen(error))
            with self._changed:
                waiting, self._queue = self._queue, deque()
            self.metrics.requests["failed"] += len(waiting)
            for stream in waiting:
                stream.put(GenerationFailed(f"the model cannot be opened: {error}"))
        else:
            self.metrics.wakes += 1
            self.metrics.wake_seconds += time.monotonic() - began

    def _take(self, model: ModelLike) -> None:
        try:
            self._slots = [Slot(model.open_session(self.context)) for _ in range(self._slot_count)]
        except BaseException:
            model.close()
            raise
        self._idle = list(self._slots)
        self._idle_since = time.monotonic()
        self._model = model

    def _unload(self) -> None:
        """Give the memory of the model and of its conversations back."""
        self._idle.clear()
        while self._slots:
            self._slots.pop().close()  # held by nobody then, so that its memory can go as well
        if self._model is not None:
            self._model.close()
            self._at_rest()
        return_free_memory()
        self._model = None

    def _round(self) -> None:
        if self._queue:
            self._assign()
        model = self._model
        assert model is not None
        prefilling: list[Job] = []
        decoding: list[Job] = []
        for job in [*self._jobs]:
            if job.stream.cancelled:
                self._release(job, "cancelled")
            elif job.prefilling:
                prefilling.append(job)
            else:
                decoding.append(job)
        if prefilling:
            first, *others = prefilling
            self._jobs = [*decoding, *others, first]
            self._prefill(
                first, min(SHARED_CHUNK, model.max_chunk) if decoding else model.max_chunk
            )
        for start in range(0, len(decoding), model.max_chunk):
            self._decode(model, decoding[start : start + model.max_chunk])

    def _assign(self) -> None:
        """Give waiting requests to idle slots."""
        with self._changed:
            while self._queue and self._idle:
                self._start(self._queue.popleft())

    def _start(self, stream: Stream) -> None:
        request = stream.request
        reusing = () if request.score_prompt else request.prompt
        slot, reused = prefix_cache.choose(self._idle, reusing)
        try:
            job = Job(stream, slot, reused, self._tokenizer, self.metrics)
        except Exception as error:
            self.metrics.requests["failed"] += 1
            self._fail(stream, slot, error)
        else:
            self._idle.remove(slot)
            self._jobs.append(job)

    def _prefill(self, job: Job, limit: int) -> None:
        """Read a chunk of the job's prompt."""
        began = time.monotonic()
        if job.unread:
            self._prompt_begins()
        try:
            done = job.prefill(limit)
        except Exception as error:
            self._drop_failed(job, error)
            return
        self.metrics.prefill_seconds += time.monotonic() - began
        if done:
            self._complete(job)
        elif not job.prefilling:
            self._prompt_read()

    def _decode(self, model: ModelLike, jobs: list[Job]) -> None:
        """Generate a token of each job in one step.

        Should it fail, nobody can tell whose fault it was: each reads its tokens again, alone, and
        the one at fault will fail there.
        """
        began = time.monotonic()
        try:
            view = model.step_batch([job.slot.session for job in jobs], [job.token for job in jobs])
        except Exception as error:
            if len(jobs) == 1:
                self._drop_failed(jobs[0], error)
                return
            log.warning("a step of %d requests failed, each goes on alone: %s", len(jobs), error)
            for job in jobs:
                job.read_again()
            return
        for row, job in enumerate(jobs):
            try:
                done = job.decode(view, row)
            except Exception as error:
                self._drop_failed(job, error)
            else:
                if done:
                    self._complete(job)
        self.metrics.decode_seconds += time.monotonic() - began

    def _complete(self, job: Job) -> None:
        self._release(job, "completed")
        job.stream.put(None)

    def _drop_failed(self, job: Job, error: Exception) -> None:
        self._release(job, "failed")
        self._fail(job.stream, job.slot, error)

    def _fail(self, stream: Stream, slot: Slot, error: Exception) -> None:
        log.error("a request failed: %s", error, exc_info=_unforeseen(error))
        slot.reset()
        stream.put(GenerationFailed(f"the model failed: {error}"))

    def _release(self, job: Job, outcome: str) -> None:
        with self._changed:
            self._jobs.remove(job)
            self._idle.append(job.slot)
            self.metrics.requests[outcome] += 1
        if not self._jobs:
            self._idle_since = time.monotonic()
            self._at_rest()


def _unforeseen(error: Exception) -> bool:
    """Whether the log should say where it came from."""
    return not isinstance(error, EmberdError)
