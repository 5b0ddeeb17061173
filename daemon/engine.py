"""Runs requests on a model: queue, slots, scheduling.

One worker thread owns the model. A round is one chunk of one prompt, then one step that gives every
answer a token: no stream waits for more than one chunk between two tokens, and prompts take turns.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass

from emberd.daemon import prefix_cache
from emberd.daemon.errors import EmberdError
from emberd.daemon.generation import Request
from emberd.daemon.job import Job
from emberd.daemon.metrics import Metrics
from emberd.daemon.prefix_cache import Slot
from emberd.daemon.protocols import ModelLike
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

    slots: int
    busy: int
    queued: int
    max_queue: int
    tokens: int


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
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self.context = context
        self.metrics = Metrics()
        self._max_queue = max_queue
        self._slots = [Slot(model.open_session(context)) for _ in range(slots)]
        self._idle = list(self._slots)
        self._queue: deque[Stream] = deque()
        self._jobs: list[Job] = []
        self._changed = threading.Condition()
        self._closing = False
        self._worker = threading.Thread(target=self._work, name="engine", daemon=True)
        self._worker.start()

    @property
    def vocab_size(self) -> int:
        return self._model.vocab_size

    @property
    def load(self) -> Load:
        return Load(
            slots=len(self._slots),
            busy=len(self._jobs),
            queued=len(self._queue),
            max_queue=self._max_queue,
            tokens=sum(len(slot.tokens) for slot in self._slots),
        )

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
        stream = Stream(request, self.cancel)
        with self._changed:
            if self._closing:
                raise EngineClosed("the daemon is shutting down")
            waiting = len(self._queue) - len(self._idle)
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
        for slot in self._slots:
            slot.close()
        self._slots.clear()
        self._model.close()

    def _work(self) -> None:
        while self._assign():
            prefilling = [job for job in self._jobs if job.prefilling]
            decoding = [job for job in self._jobs if not job.prefilling]
            if prefilling:
                first, *others = prefilling
                self._jobs = [*decoding, *others, first]
                self._prefill(first, SHARED_CHUNK if decoding else self._model.max_chunk)
            largest = self._model.max_chunk
            for start in range(0, len(decoding), largest):
                self._decode(decoding[start : start + largest])

    def _assign(self) -> bool:
        """Give waiting requests to idle slots; False when the engine closes."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._queue or self._jobs)
            if self._closing:
                return False
            while self._queue and self._idle:
                self._start(self._queue.popleft())
        return True

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
        if self._drop_cancelled(job):
            return
        began = time.monotonic()
        try:
            done = job.prefill(min(limit, self._model.max_chunk))
        except Exception as error:
            self._drop_failed(job, error)
            return
        self.metrics.prefill_seconds += time.monotonic() - began
        if done:
            self._complete(job)

    def _decode(self, jobs: list[Job]) -> None:
        """Generate a token of each job in one step.

        Should it fail, nobody can tell whose fault it was: each reads its tokens again, alone, and
        the one at fault will fail there.
        """
        jobs = [job for job in jobs if not self._drop_cancelled(job)]
        if not jobs:
            return
        began = time.monotonic()
        try:
            view = prefix_cache.step_together(
                self._model, [job.slot for job in jobs], [job.token for job in jobs]
            )
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
                done = job.decode(view.row(row))
            except Exception as error:
                self._drop_failed(job, error)
            else:
                if done:
                    self._complete(job)
        self.metrics.decode_seconds += time.monotonic() - began

    def _complete(self, job: Job) -> None:
        self._release(job, "completed")
        job.stream.put(None)

    def _drop_cancelled(self, job: Job) -> bool:
        if job.stream.cancelled:
            self._release(job, "cancelled")
        return job.stream.cancelled

    def _drop_failed(self, job: Job, error: Exception) -> None:
        self._release(job, "failed")
        self._fail(job.stream, job.slot, error)

    def _fail(self, stream: Stream, slot: Slot, error: Exception) -> None:
        log.error("a request failed: %s", error, exc_info=not isinstance(error, EmberdError))
        slot.reset()
        stream.put(GenerationFailed(f"the model failed: {error}"))

    def _release(self, job: Job, outcome: str) -> None:
        with self._changed:
            self._jobs.remove(job)
            self._idle.append(job.slot)
            self.metrics.requests[outcome] += 1
