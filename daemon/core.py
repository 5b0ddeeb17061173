"""Models: the Python face of the native core (daemon/native), through ctypes; see also session.py.

One call per step; the interpreter lock is released meanwhile. A model runs one step at a time: its
sessions may be used from several threads, and wait for each other.
"""

from __future__ import annotations

import ctypes
import math
import os
import threading
from array import array
from collections.abc import Sequence
from typing import Protocol

from emberd.daemon.artifact import EXPERTS, WEIGHTS, Artifact
from emberd.daemon.bindings import (
    ERROR_BYTES,
    FAILED,
    OK,
    Cost,
    ExpertCounters,
    ExpertLayout,
    ExpertWatch,
    Row,
    Trace,
    accepted,
    config,
    core,
    opened,
)
from emberd.daemon.errors import EmberdError
from emberd.daemon.logits import Logits
from emberd.daemon.machine import physical_cpus
from emberd.daemon.memory import address, anonymous_memory
from emberd.daemon.session import Session

MAX_THREADS = 256
MAX_READERS = 64
MAX_STALL_SECONDS = 3600
PINNED = 2**31 - 1  # a priority


class _Batch:
    """What a step of up to `most` sessions is given: kept, as most steps decode another token of
    the same."""

    def __init__(self, most: int) -> None:
        self.sessions = array("Q", bytes(8 * most))
        self.tokens = array("i", bytes(4 * most))
        self.lengths = array("q", bytes(8 * most))
        memories = (self.sessions, self.tokens, self.lengths)
        self.addresses = tuple(memory.buffer_info()[0] for memory in memories)


class TraceOwner(Protocol):
    """Holds the memory that routing is noted in."""

    memory: Trace

    def reserve(self, tokens: int, sessions: int) -> None:
        """Makes room for so many more tokens in `memory`. Called before a step of so many, of one
        session or one of each."""

    def noted(self, sessions: Sequence[Session]) -> None:
        """Called after a step of these sessions, each of which had as many tokens."""


class Model:
    """An artifact's model, mapped and ready to run.

    `threads`: including the calling one; default one per physical core that this process may use.
    `expert_budget`: as in set_expert_budget; `reader_threads` read the experts that it leaves out.
    Raises EmberdError when the artifact's program or kernels are not as they must be, or when
    memory, threads or descriptors run out.

    Attributes: `max_chunk` (tokens that a step can have), `vocab_size`, `max_context` (tokens),
    `threads`, `state_bytes` (recurrent state of a session),
    `kv_bytes_per_token`, `symbols` (names of the kernels), `experts` (layers, experts of each,
    top_k, expert_bytes), `expert_budget` (bytes; None: all experts are mapped),
    `least_expert_budget` (bytes; a smaller one is refused).
    """

    def __init__(
        self,
        artifact: Artifact,
        threads: int | None = None,
        expert_budget: int | None = None,
        reader_threads: int = 4,
    ) -> None:
        self._handle: int | None = None
        self._lock = threading.RLock()
        self._store_lock = threading.Lock()  # held where what may be called during a step must not
        self._sessions: set[int] = set()
        self._steps = 0  # which step the logits are of
        self._error = ctypes.create_string_buffer(ERROR_BYTES)  # what a step failed of
        cpus = physical_cpus()
        self.threads = len(cpus) if threads is None else threads
        if not 1 <= self.threads <= MAX_THREADS:
            raise EmberdError(f"{self.threads} threads: expected 1 to {MAX_THREADS}")
        if not 1 <= reader_threads <= MAX_READERS:
            raise EmberdError(f"{reader_threads} reader threads: expected 1 to {MAX_READERS}")
        program = artifact.program
        self.symbols = program.symbols
        self._costs: ctypes.Array[Cost] | None = None
        self._trace: TraceOwner | None = None
        self.max_chunk = program.chunk_sizes[-1]
        self.vocab_size = artifact.model.vocab_size
        self.max_context = artifact.model.max_context
        self.state_bytes = program.section_bytes["state"]
        self.kv_bytes_per_token = program.section_bytes["kv_per_token"]
        self._logits = anonymous_memory(program.section_bytes["logits"], "logits")
        self._logits_address = address(self._logits)
        self._bounds = anonymous_memory(program.section_bytes["bounds"], "bounds of logits")
        has_bounds = program.section_bytes["bounds"] > 0
        self._bounds_address = address(self._bounds) if has_bounds else None
        self._rows: dict[int, Row] = {}  # of logits, those that were asked for
        self._batch = _Batch(self.max_chunk)
        files: list[int] = []
        try:
            for name in (WEIGHTS, EXPERTS):
                files.append(artifact.open_file(name))
            addresses = self._logits_address, self._bounds_address
            description = config(artifact, *addresses, files, self.threads, cpus, reader_threads)
            self._handle = opened(core.ember_model_open, ctypes.byref(description))
            self.experts: ExpertLayout = core.ember_model_experts(self._handle)
            self.least_expert_budget = int(core.ember_model_least_expert_budget(self._handle))
            self._counters = (ExpertCounters * self.experts.layers)()
            count = self.experts.layers * self.experts.experts
            self._resident, self._chosen = array("B", bytes(count)), array("Q", bytes(8 * count))
            watch = ExpertWatch(self._resident.buffer_info()[0], self._chosen.buffer_info()[0])
            core.ember_model_watch_experts(self._handle, watch)
            self.expert_budget: int | None = None
            if expert_budget is not None:
                self.set_expert_budget(expert_budget)
        except EmberdError as error:
            raise EmberdError(f"{artifact.path}: {error}") from None
        finally:
            for file in files:
                os.close(file)

    def open_session(self, capacity: int) -> Session:
        """A new session of up to `capacity` tokens (at most max_context), with zero state.

        Memory is taken as the session grows, not for the capacity.
        """
        if not 1 <= capacity <= self.max_context:
            raise EmberdError(f"a session of {capacity} tokens: expected 1 to {self.max_context}")
        with self._lock:
            handle = opened(core.ember_session_open, self._opened(), capacity)
            self._sessions.add(handle)
        return Session(self, handle, capacity)

    @property
    def token_demand(self) -> int:
        """Bytes of the experts that a token needs: with a smaller budget, most are read for every
        token again."""
        experts = self.experts
        return int(experts.layers * experts.top_k * experts.expert_bytes)

    def set_expert_budget(self, budget: int | None) -> None:
        """Keeps at most so many bytes of experts in memory, and reads the others as steps need
        them; None, or a budget that holds them all: they are mapped. Results stay the same.

        Raises EmberdError for a budget that is too small for a single step, or when memory or
        threads run out; the budget is then as before.
        """
        with self._lock, self._store_lock:
            handle = self._opened()
            asked = 2**63 - 1 if budget is None else max(-1, min(budget, 2**63 - 1))
            accepted(core.ember_model_set_expert_budget, handle, asked, self._counters)
            self.expert_budget = budget

    def break_stalls(self, deadline: float, weight: float) -> None:
        """Bounds what a token that is decoded alone waits for experts: after `deadline` seconds in
        all, missing ones whose routing weight is below `weight` are skipped and counted. The
        others' weights then grow by one factor that makes up for theirs; the expert of the greatest
        weight in a layer is always waited for. A deadline of 0 turns that off, as it is at first.

        Results depend on the disk while it is on. Prompts (Session.step and prefill) and batches of
        several tokens skip none. Raises EmberdError for a program built without moa_fusion.
        """
        if not (0 <= deadline <= MAX_STALL_SECONDS and 0 <= weight <= 1):
            raise EmberdError(
                f"a stall deadline of {deadline} s for weights below {weight}: expected 0 to "
                f"{MAX_STALL_SECONDS} s and 0 to 1"
            )
        with self._lock:
            nanoseconds = math.ceil(deadline * 1e9)
            accepted(core.ember_model_break_stalls, self._opened(), nanoseconds, weight)

    def prefer_resident_experts(self, margin: float) -> None:
        """Cache-aware routing: a token that is decoded takes, in place of a missing expert, the
        likeliest one in memory, if its probability is at most `margin` less, as a share of those of
        all that the router chose: so much routing weight is lost. Weights are those that the router
        would have given to the new choice; a token's first expert is never replaced. Replacements
        are counted. A margin of 0 turns that off, as it is at first.

        Results depend on what is in memory while it is on; prompts (Session.step and prefill)
        replace none. Raises EmberdError for a program built without moa_fusion.
        """
        if not 0 <= margin <= 1:
            raise EmberdError(f"a routing margin of {margin}: expected 0 to 1")
        with self._lock:
            accepted(core.ember_model_prefer_resident, self._opened(), margin)

    def expect_experts(self, expects: bool) -> None:
        """Whether steps ask the router of each next layer about the present layer's tokens, and
        have missing experts read that it chooses: one at a time, after those that the step waits
        for, and in place of none that it needs or expects. As a rule the next layer then finds
        many of its experts read, or being read. Off at first; without effect while all experts are
        mapped, and in a program built without moa_fusion."""
        with self._lock:
            core.ember_model_expect_experts(self._opened(), expects)

    def set_expert_priorities(self, priorities: Sequence[int]) -> None:
        """Sets the priority of every expert, int32 [layers * experts]: 0 at first, PINNED at most.

        The expert of the lowest priority makes place for another first, of equal ones the one that
        was unused for longest; one that is PINNED goes only when a step finds no other. May be
        called during a step.
        """
        with self._store_lock:
            values = _int32(priorities, "expert priorities")
            count = self.experts.layers * self.experts.experts
            if len(values) != count:
                raise EmberdError(f"{len(values)} expert priorities: expected {count}")
            core.ember_model_prioritise_experts(self._opened(), values.buffer_info()[0])

    def warm_experts(self, experts: Sequence[tuple[int, int]]) -> None:
        """Has experts (layer, expert) read in the background, in this order, as far as there is
        room besides those that are pinned, of a higher priority or used since; instead of what is
        left of an earlier call. Reads that a step waits for go first. Without effect while all
        experts are mapped. May be called during a step. Raises EmberdError for an expert that does
        not exist."""
        layout = self.experts
        for layer, expert in experts:
            if not (0 <= layer < layout.layers and 0 <= expert < layout.experts):
                raise EmberdError(f"expert {expert} of layer {layer} does not exist")
        self.warm_indices(
            array("i", (layer * layout.experts + expert for layer, expert in experts))
        )

    def warm_indices(self, indices: array[int]) -> None:
        """The same for int32 layer * experts + expert."""
        with self._store_lock:
            handle = self._opened()
            address, count = indices.buffer_info()
            accepted(core.ember_model_warm_experts, handle, address, count)

    def expert_counters(self) -> list[ExpertCounters]:
        """What the experts of each layer have cost since the model was opened, while not all of
        them were mapped; may be called during a step."""
        return [ExpertCounters.from_buffer_copy(counters) for counters in self._counters]

    def resident_experts(self) -> array[int]:
        """Whether each expert is in memory, uint8 [layers * experts]; all are while they are
        mapped. May be called during a step."""
        return self._resident[:]

    def chosen_experts(self) -> array[int]:
        """How many tokens chose each expert since the model was opened, uint64 [layers * experts];
        may be called during a step."""
        return self._chosen[:]

    def time_steps(self, costs: ctypes.Array[Cost] | None) -> None:
        """From now on every step adds to the entry of its kernel in `costs` (one for each symbol,
        and a last one for the acquiring of experts); None: no more. See profile.Profile."""
        with self._lock:
            if self._handle is not None:
                core.ember_model_profile(self._handle, costs)
            elif costs is not None:
                raise EmberdError("the model is closed")
            self._costs = costs  # the core writes into it, so it must stay

    def trace_routing(self, owner: TraceOwner | None) -> None:
        """From now on every step notes the routing of its tokens in the owner's memory; None: no
        more. See trace.RoutingTrace. Raises EmberdError for a program built without moa_fusion."""
        with self._lock:
            if self._handle is not None:
                memory = None if owner is None else ctypes.byref(owner.memory)
                accepted(core.ember_model_trace, self._handle, memory)
            elif owner is not None:
                raise EmberdError("the model is closed")
            self._trace = owner  # the core writes into its memory, so it must stay

    def step_batch(self, sessions: Sequence[Session], tokens: Sequence[int]) -> Logits:
        """Decodes: appends one token to each of several sessions, tokens[i] to sessions[i].

        Returns the logits of all, a row for each session. They are those that each session would
        have got alone; the weights are read once for all of them. Raises as `Session.step`, with
        nothing done; a step that fails half-way fails all of the sessions.
        """
        with self._lock:
            self._fill_batch(sessions, tokens)
            count = len(sessions)
            self._begin_step(count, count)
            status = core.ember_model_step(
                self._handle, *self._batch.addresses, count, self._error, ERROR_BYTES
            )
            if status != OK:
                message = self._error.value.decode(errors="replace")
                for session in sessions if status == FAILED else ():
                    session._failure = message
                raise EmberdError(message)
            for session in sessions:
                if session._rewound:
                    session._forget_later()
                session.length += 1
            self._end_step(sessions)
            return Logits(self, count)

    def _begin_step(self, tokens: int, sessions: int = 1) -> None:
        self._steps += 1
        if self._trace is not None:
            self._trace.reserve(tokens, sessions)

    def _end_step(self, sessions: Sequence[Session]) -> None:
        if self._trace is not None:
            self._trace.noted(sessions)

    def _fill_batch(self, sessions: Sequence[Session], tokens: Sequence[int]) -> None:
        """Checks that each of the tokens is fit for its session."""
        if not len(sessions) == len(tokens) == len(set(sessions)):
            raise EmberdError(f"{len(tokens)} tokens for a batch of {len(sessions)} sessions")
        if not 1 <= len(sessions) <= self.max_chunk:
            raise EmberdError(f"a batch of {len(sessions)}: expected 1 to {self.max_chunk}")
        batch = self._batch
        try:
            for index, session in enumerate(sessions):
                if session._model is not self:
                    raise EmberdError("a session in the batch is of another model")
                session._check_usable(1)
                token = tokens[index]
                if not 0 <= token < self.vocab_size:
                    raise self._outside(token)
                batch.sessions[index] = session._handle
                batch.tokens[index] = token
                batch.lengths[index] = session.length
        except TypeError as error:
            raise self._no_integers(error) from None

    def _checked(self, tokens: Sequence[int]) -> array[int]:
        """The tokens as int32, all in the vocabulary."""
        try:
            ids = array("i", tokens)
        except (OverflowError, TypeError) as error:
            raise self._no_integers(error) from None
        if not ids:
            raise EmberdError("no tokens")
        if min(ids) < 0 or max(ids) >= self.vocab_size:
            raise self._outside(next(token for token in ids if not 0 <= token < self.vocab_size))
        return ids

    def _outside(self, token: int) -> EmberdError:
        return EmberdError(f"token id {token} is outside the vocabulary of {self.vocab_size}")

    def _no_integers(self, error: Exception) -> EmberdError:
        return EmberdError(f"token ids must be integers below {self.vocab_size}: {error}")

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._handle is None

    def _opened(self) -> int:
        if self._handle is None:
            raise EmberdError("the model is closed")
        return self._handle

    def close(self) -> None:
        """Gives threads, memory and mappings back, those of open sessions too. Idempotent."""
        with self._lock, self._store_lock:
            if self._handle is None:
                return
            for session in self._sessions:
                core.ember_session_close(session)
            self._sessions.clear()
            core.ember_model_close(self._handle)
            self._handle = None
            self._trace = None
            self._steps += 1

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def _int32(values: Sequence[int], what: str) -> array[int]:
    try:
        return array("i", values)
    except (OverflowError, TypeError) as error:
        raise EmberdError(f"{what} must be 32-bit integers: {error}") from None
