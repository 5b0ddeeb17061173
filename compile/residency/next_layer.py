"""What the router of each next layer makes of a layer's hidden state, while commands are run.

A token's hidden state changes little from layer to layer, so that the next router, asked early,
names many of the experts that it will choose (Eliseev and Mazur 2023, "Fast inference of
mixture-of-experts language models with offloading"). For that nothing is built into artifacts: a
program is data, and is given a few more steps before it is opened. They write, next to the logits,
the input of each layer's experts normed as the next layer norms its own.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import numpy as np
from emberd.compile.layout import aligned
from emberd.daemon.artifact import WEIGHTS, Artifact
from emberd.daemon.core import Model
from emberd.daemon.logits import Logits
from emberd.daemon.program import (
    Buffer,
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
    """How a layer of a sequence routes: `step` calls the router, and `norm` is the kernel that
    before it made `normed` of `hidden`; the others are buffers. `count`: as in NextLayerRouters."""

    step: int
    norm: int
    hidden: int
    norm_weight: int
    normed: int
    weight: int
    count: int


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
        self._first = -(-program.chunk_sizes[-1] // _ROWS_ALIGNED) * _ROWS_ALIGNED
        self._row_bytes = artifact.model.vocab_size * 4
        self._stride = aligned(program.chunk_sizes[-1] * artifact.model.hidden_size * 4)
        self._rows = -(-self.layers * self._stride // self._row_bytes)
        self._weights: list[NDArray[np.float32]] = []
        if self.layers:
            self.count = largest[0].count
            self.artifact = copy.copy(artifact)
            self.artifact.program = self._extended(program, routings)
            file = artifact.path / WEIGHTS
            for routing in largest[1:]:
                weight = program.buffers[routing.weight]
                found = np.memmap(file, np.float32, "r", weight.offset, weight.shape)
                self._weights.append(found)

    def experts(self, model: Model, tokens: int) -> NDArray[np.uint16]:
        """uint16 [tokens, layers, count]: of the tokens of the model's last step, which was a
        batch, the experts that each router puts first, best first."""
        memory = np.asarray(Logits(model, self._rows, self._first).memory()).reshape(-1)
        found = np.empty((tokens, self.layers, self.count), np.uint16)
        for layer, weight in enumerate(self._weights):
            start = layer * self._stride // 4
            normed = memory[start : start + tokens * weight.shape[1]].reshape(tokens, -1)
            order = np.argsort(-(normed @ weight.T), axis=-1, kind="stable")
            found[:, layer] = order[:, : self.count]
        return found

    def _extended(self, program: Program, routings: dict[int, list[_Routing]]) -> EncodedProgram:
        buffers: list[Buffer] = list(program.buffers)
        sequences = []
        start = self._first * self._row_bytes
        for sequence in program.sequences:
            steps = list(sequence.steps)
            if sequence.role == "batch":
                layers = routings[sequence.tokens]
                for layer in range(len(layers) - 2, -1, -1):
                    routing, later = layers[layer], layers[layer + 1]
                    place = replace(
                        buffers[routing.normed],
                        section=Section.LOGITS,
                        offset=start + layer * self._stride,
                    )
                    buffers.append(place)
                    arguments = (routing.hidden, later.norm_weight, len(buffers) - 1)
                    steps.insert(routing.step + 1, Step(StepKind.CALL, routing.norm, arguments))
            sequences.append(replace(sequence, steps=tuple(steps)))
        logits = start + self._rows * self._row_bytes
        sizes = {**program.section_bytes, "logits": logits}
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
            normed, weight, *_ = sequence.steps[router].arguments
            norm = _last_call(program, sequence.steps[:router], "rms_norm_", normed, 2)
            if norm is None:
                return []
            call = sequence.steps[norm]
            hidden, norm_weight, _ = call.arguments
            experts, top_k = program.buffers[weight].shape[0], program.buffers[ids].shape[1]
            count = min(2 * top_k, experts)
            routings.append(
                _Routing(router, call.symbol, hidden, norm_weight, normed, weight, count)
            )
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
