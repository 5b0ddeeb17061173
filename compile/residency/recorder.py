"""Runs commands through a model and notes their routing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from emberd.compile.residency.commands import Command
from emberd.compile.residency.next_layer import NextLayerRouters
from emberd.compile.residency.trace import CommandTrace
from emberd.daemon.core import Model
from emberd.daemon.session import LogitsRole, Session
from emberd.daemon.trace import RoutingTrace
from numpy.typing import NDArray

STREAMS = 8  # commands whose answers are generated in one step

Routed = tuple[NDArray[np.integer], NDArray[np.floating]]
"""ids and weights [layers, top_k] of a token."""


class Recorder:
    """Runs commands and notes their routing; answers are the likeliest tokens.

    `max_tokens`: of an answer that no stop token ends. `next_layer`: whose artifact the model is
    of, to note what its routers expect too. Several commands are answered at a time, which changes
    nothing but the time it takes.
    """

    def __init__(
        self,
        model: Model,
        stop_tokens: Sequence[int],
        max_tokens: int,
        next_layer: NextLayerRouters | None = None,
    ) -> None:
        self._model = model
        self._stop_tokens = frozenset(stop_tokens)
        self._max_tokens = max_tokens
        self._next_layer = next_layer
        self._sessions = [model.open_session(model.max_context) for _ in range(STREAMS)]

    def run(self, commands: Sequence[Command]) -> list[CommandTrace]:
        """The traces of up to STREAMS commands."""
        with RoutingTrace(self._model) as trace:
            runs = [
                _Run(command, session, self._max_tokens)
                for command, session in zip(commands, self._sessions, strict=False)
            ]
            for run in runs:
                run.prefill(trace)
            while running := [run for run in runs if run.goes_on(self._stop_tokens)]:
                logits = self._model.step_batch(
                    [run.session for run in running], [run.token for run in running]
                )
                tops = [logits.top(1, row)[0][0] for row in range(len(running))]
                if self._next_layer is not None:
                    found = self._next_layer.experts(self._model, len(running))
                    for run, experts in zip(running, found, strict=True):
                        run.next_layer.append(experts)
                for run, routing, token in zip(running, _by_token(trace), tops, strict=True):
                    run.note(routing, token)
        return [run.trace() for run in runs]


class _Run:
    """A command on its way. `token`: the one to read next; `next_layer`: what was expected."""

    def __init__(self, command: Command, session: Session, max_tokens: int) -> None:
        self.session = session
        self.token = -1
        self.next_layer: list[NDArray[np.uint16]] = []
        self._command = command
        room = session.capacity - len(command.tokens)
        self._left = 0 if command.complete else min(max_tokens, room)
        self._routing: list[Routed] = []

    def prefill(self, trace: RoutingTrace) -> None:
        self.session.reset()
        logits = self.session.prefill(self._command.tokens, LogitsRole.LAST)
        assert logits is not None
        self.token = logits.top(1)[0][0]
        self._routing += _by_token(trace)

    def goes_on(self, stop_tokens: frozenset[int]) -> bool:
        return self._left > 0 and self.token not in stop_tokens

    def note(self, routing: Routed, token: int) -> None:
        """The routing of the token read, and the one that follows."""
        self._routing.append(routing)
        self.token = token
        self._left -= 1

    def trace(self) -> CommandTrace:
        ids, weights = zip(*self._routing, strict=True)
        return CommandTrace(
            self._command.command_class,
            len(self._command.tokens),
            np.stack(ids).astype(np.uint16),
            np.stack(weights).astype(np.float16),
            np.stack(self.next_layer) if self.next_layer else None,
        )


def _by_token(trace: RoutingTrace) -> Iterator[Routed]:
    """What was noted since the last time, of each token."""
    routing = trace.take()
    return zip(np.array(routing.ids), np.array(routing.weights), strict=True)
