"""Sessions of a model: what it remembers of a conversation."""

from __future__ import annotations

import mmap
from array import array
from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING
from weakref import WeakSet

from emberd.daemon.bindings import ERROR_BYTES, FAILED, OK, core
from emberd.daemon.errors import EmberdError
from emberd.daemon.logits import Logits
from emberd.daemon.memory import address, anonymous_memory

if TYPE_CHECKING:
    from emberd.daemon.core import Model


class ContextOverflow(EmberdError):  # noqa: N818
    """The tokens do not fit into the session's capacity; nothing was done."""


class LogitsRole(IntEnum):
    """Which positions of a step get logits."""

    NONE = 0
    LAST = 1
    ALL = 2


class Session:
    """A conversation's place in a model: recurrent state, KV cache and `length`, tokens so far.

    A step that fails half-way leaves the state undefined: every later call raises EmberdError
    until `reset`. So does every call after the session or its model is closed.
    """

    def __init__(self, model: Model, handle: int, capacity: int) -> None:
        """Use Model.open_session."""
        self.length = 0
        self.capacity = capacity
        self._model = model
        self._handle = handle
        self._failure: str | None = None
        self._snapshots: WeakSet[Snapshot] = WeakSet()
        self._rewound = False

    def step(self, tokens: Sequence[int], logits: LogitsRole = LogitsRole.LAST) -> Logits | None:
        """Reads `tokens` of a prompt, at most the model's max_chunk; Model.step_batch decodes.

        Returns the logits of the last or of all of them, None for LogitsRole.NONE. Raises
        ContextOverflow, or EmberdError for tokens outside the vocabulary, with nothing done.
        """
        with self._model._lock:
            ids = self._checked(tokens)
            if len(ids) > self._model.max_chunk:
                raise EmberdError(
                    f"a step of {len(ids)} tokens: this model takes {self._model.max_chunk}"
                )
            return self._step(ids, 0, len(ids), logits)

    def prefill(self, tokens: Sequence[int], logits: LogitsRole = LogitsRole.LAST) -> Logits | None:
        """Reads a prompt of any number of tokens, cut into steps; logits as in `step`.

        LogitsRole.ALL is for tokens that fit one step: logits live until the next.
        """
        with self._model._lock:
            ids = self._checked(tokens)
            size, result = self._model.max_chunk, None
            if logits is LogitsRole.ALL and len(ids) > size:
                raise EmberdError(f"logits of all {len(ids)} tokens: take them step by step")
            for start in range(0, len(ids), size):
                count = min(size, len(ids) - start)
                last = start + count == len(ids)
                result = self._step(ids, start, count, logits if last else LogitsRole.NONE)
            return result

    def snapshot(self) -> Snapshot:
        """A copy of the recurrent state and the length, for `restore`."""
        with self._model._lock:
            self._check_usable()
            state = anonymous_memory(self._model.state_bytes, "a snapshot")
            core.ember_session_save(self._handle, address(state))
            snapshot = Snapshot(self.length, state)
            self._snapshots.add(snapshot)
            return snapshot

    def restore(self, snapshot: Snapshot) -> None:
        """Goes back to a snapshot of this session.

        Raises EmberdError when the KV cache no longer holds the snapshot's tokens: the session was
        reset, or went on from an earlier point.
        """
        with self._model._lock:
            self._check_usable()
            if snapshot not in self._snapshots:
                raise EmberdError(
                    f"the snapshot of {snapshot.length} tokens is not of this session's history"
                )
            core.ember_session_load(self._handle, address(snapshot._state))
            self.length = snapshot.length
            self._rewound = True

    def reset(self) -> None:
        """Forgets everything: zero state, length 0, memory of the KV cache given back."""
        with self._model._lock:
            self._failure = None
            self._check_usable()
            core.ember_session_reset(self._handle)
            self._snapshots.clear()
            self.length = 0

    def close(self) -> None:
        """Gives the session's memory back. Idempotent."""
        with self._model._lock:
            if self._handle in self._model._sessions:
                self._model._sessions.remove(self._handle)
                core.ember_session_close(self._handle)
            self._handle = 0

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def _check_usable(self, more: int = 0) -> None:
        """Whether it is open, sound, and has room for so many more tokens."""
        if self._model._handle is None:
            raise EmberdError("the model is closed")
        if self._handle == 0:
            raise EmberdError("the session is closed")
        if self._failure is not None:
            raise EmberdError(f"the session failed before ({self._failure}): reset it")
        if self.length + more > self.capacity:
            raise ContextOverflow(
                f"{more} more tokens do not fit: the session has {self.length} of {self.capacity}"
            )

    def _checked(self, tokens: Sequence[int]) -> array[int]:
        """The tokens as int32, all in the vocabulary, fitting the capacity."""
        self._check_usable()
        ids = self._model._checked(tokens)
        self._check_usable(len(ids))
        return ids

    def _step(self, ids: array[int], start: int, count: int, logits: LogitsRole) -> Logits | None:
        if self._rewound:
            self._forget_later()
        self._model._begin_step(count)
        first, _ = ids.buffer_info()
        error = self._model._error
        status = core.ember_session_step(
            self._handle,
            first + start * ids.itemsize,
            count,
            self.length,
            logits,
            error,
            ERROR_BYTES,
        )
        if status != OK:
            message = error.value.decode(errors="replace")
            if status == FAILED:
                self._failure = message
            raise EmberdError(message)
        self.length += count
        self._model._end_step([self])
        if logits is LogitsRole.NONE:
            return None
        return Logits(self._model, count if logits is LogitsRole.ALL else 1)

    def _forget_later(self) -> None:
        """After going back, new tokens overwrite the KV cache that later snapshots need."""
        for snapshot in [s for s in self._snapshots if s.length > self.length]:
            self._snapshots.discard(snapshot)
        self._rewound = False


class Snapshot:
    """A session's recurrent state after its first `length` tokens."""

    def __init__(self, length: int, state: mmap.mmap) -> None:
        self.length = length
        self._state = state

    @property
    def nbytes(self) -> int:
        """Memory that the snapshot holds."""
        return len(self._state)
