"""What the router of each next layer makes of a layer's hidden state, while commands are run.

A token's hidden state changes little from layer to layer, so that the next router, asked early,
names many of the experts that it will choose (Eliseev and Mazur 2023, "Fast inference of
mixture-of-experts language models with offloading"). For that nothing is built into artifacts: a
program is data, and is given a few more steps before it is opened. They norm the input of each
layer's experts as the next layer norms its own, and call the next router, all next to the logits.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace

import numpy as np
from emberd.compile.layout import aligned
from emberd.daemon.artifact import Artifact
from emberd.daemon.core import Model
from emberd.daemon.logits import Logits
from emberd.daemon.program import (
    EncodedProgram,
    Program,
    Section,
    Sequence,
    Step,
    StepKind,
)
from numpy.typing import NDArray

_ROWS_ALIGNED = 16  # of any number of float32: their bytes are a multiple of a buffer's alignment


@dataclass(frozen=True)
class _Routing:
    """How a layer of a sequence routes: its step at `index` is `router`, of (x, weight, ids,
    weights, scores); before it, `norm` made x of the hidden state and a weight."""

    index: int
    router: Step
    norm: Step


class NextLayerRouters:
    """Asks the router of each next layer about the tokens of batches.

    Attributes: `artifact`, to be opened as a model in place of the given one; `layers`, how many
    are asked: all but the first, or none where the program has no kernels for norm and router;
    `count`, of how many experts each is asked: twice as many as a token chooses.
    """

    def __init__(self, artifact: Artifact) -> None:
        program = Program.decode(artifact.program)
        batches = [sequence for sequence in program.sequences if sequence.role == "batch"]
        routings = {sequence.tokens: _routings(program, sequence) for sequence in batches}
        largest = routings[program.chunk_sizes[-1]]
        self.layers = max(len(largest) - 1, 0)
        self.count = 0
        self.artifact = artifact
        if self.layers:
            x, weight, ids, _weights, scores = (
                program.buffers[number] for number in largest[0].router.arguments
            )
            self._experts = weight.shape[0]
            self.count = min(2 * ids.shape[1], self._experts)
            self._first = -(-program.chunk_sizes[-1] // _ROWS_ALIGNED) * _ROWS_ALIGNED
            self._row_bytes = artifact.model.vocab_size * 4
            self._x_bytes, self._ids_bytes, self._scores_bytes = (
                aligned(math.prod(buffer.shape) * 4) for buffer in (x, ids, scores)
            )
            self._padded = scores.shape[1]
            self._rows = -(-self._place(self.layers) // self._row_bytes)
            self.artifact = copy.copy(artifact)
            self.artifact.program = self._extended(program, routings)

    def experts(self, model: Model, tokens: int) -> NDArray[np.uint16]:
        """uint16 [tokens, layers, count]: of the tokens of the model's last step, which was a
        batch, the experts that each router puts first, best first."""
        found = np.empty((tokens, self.layers, self.count), np.uint16)
        if not self.layers:
            return found
        memory = np.asarray(Logits(model, self._rows, self._first).memory()).reshape(-1)
        for layer in range(self.layers):
            start = (self._place(layer) + 2 * self._ids_bytes) // 4
            scores = memory[start:][: tokens * self._padded].reshape(tokens, -1)
            order = np.argsort(-scores[:, : self._experts], axis=-1, kind="stable")
            found[:, layer] = order[:, : self.count]
        return found

    def _place(self, layer: int) -> int:
        """Where the results of a layer's next router begin, in bytes after the logits: ids, weights
        and scores. Before the first one's is room for x."""
        return self._x_bytes + layer * (2 * self._ids_bytes + self._scores_bytes)

    def _extended(self, program: Program, routings: dict[int, list[_Routing]]) -> EncodedProgram:
        buffers = list(program.buffers)
        start = self._first * self._row_bytes

        def place(number: int, offset: int) -> int:
            """A buffer like the one of this number, after the logits."""
            buffers.append(replace(buffers[number], section=Section.LOGITS, offset=start + offset))
            return len(buffers) - 1

        sequences = []
        for sequence in program.sequences:
            steps = list(sequence.steps)
            layers = routings[sequence.tokens] if sequence.role == "batch" else []
            for layer in range(len(layers) - 2, -1, -1):
                here, later = layers[layer], layers[layer + 1]
                x, _weight, ids, weights, scores = here.router.arguments
                weight, at = later.router.arguments[1], self._place(layer)
                normed = place(x, 0)
                norm = replace(
                    here.norm,
                    arguments=(here.norm.arguments[0], later.norm.arguments[1], normed),
                )
                results = (
                    place(ids, at),
                    place(weights, at + self._ids_bytes),
                    place(scores, at + 2 * self._ids_bytes),
                )
                router = replace(here.router, arguments=(normed, weight, *results))
                steps[here.index + 1 : here.index + 1] = [norm, router]
            sequences.append(replace(sequence, steps=tuple(steps)))
        sizes = {**program.section_bytes, "logits": start + self._rows * self._row_bytes}
        extended = replace(
            program, buffers=tuple(buffers), section_bytes=sizes, sequences=tuple(sequences)
        )
        return extended.encode()


def _routings(program: Program, sequence: Sequence) -> list[_Routing]:
    """By layer; none where one of them routes in another way."""
    routings = []
    for index, step in enumerate(sequence.steps):
        if step.kind is StepKind.ACQUIRE_EXPERTS:
            ids = step.arguments[0]
            router = _last_call(program, sequence.steps[:index], "router_", ids, 2)
            if router is None:
                return []
            call = sequence.steps[router]
            norm = _last_call(program, sequence.steps[:router], "rms_norm_", call.arguments[0], 2)
            if norm is None:
                return []
            routings.append(_Routing(router, call, sequence.steps[norm]))
    return routings


def _last_call(
    program: Program, steps: tuple[Step, ...], prefix: str, result: int, place: int
) -> int | None:
    """Which step calls a kernel of such a name last, with a result at this place of its arguments;
    None where another one is called after it that has the result there."""
    for index in range(len(steps) - 1, -1, -1):
        step = steps[index]
        if step.kind is StepKind.CALL and step.arguments[place : place + 1] == (result,):
            named = program.symbols[step.symbol].startswith(prefix)
            return index if named else None
    return None
