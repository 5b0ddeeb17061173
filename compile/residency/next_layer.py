"""What the router of each next layer makes of a layer's hidden state, while commands are run.

Programs hold the calls for it, so that the daemon can read experts ahead (compile/next_layer.py). A
program is data: before it is opened, these calls are made to run always, with the results of every
layer next to the logits.
"""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import numpy as np
from emberd.compile.layout import aligned
from emberd.daemon.artifact import Artifact
from emberd.daemon.core import Model
from emberd.daemon.logits import Logits
from emberd.daemon.program import EncodedProgram, Program, Section, Sequence, StepKind
from numpy.typing import NDArray

_ROWS_ALIGNED = 16  # of any number of float32: their bytes are a multiple of a buffer's alignment


_GROUP = 4  # steps: experts are acquired; the next layer's norm and router; others are expected


class NextLayerRouters:
    """Asks the router of each next layer about the tokens of batches.

    Attributes: `artifact`, to be opened as a model in place of the given one; `layers`, how many
    are asked: all but the first, or none where the program has no calls for it;
    `count`, of how many experts each is asked: twice as many as a token chooses.
    """

    def __init__(self, artifact: Artifact) -> None:
        program = Program.decode(artifact.program)
        largest = next(
            sequence
            for sequence in program.sequences
            if (sequence.tokens, sequence.role) == (program.chunk_sizes[-1], "batch")
        )
        ends = _ends(largest)
        self.layers = len(ends)
        self.count = 0
        self.artifact = artifact
        if self.layers:
            router = largest.steps[ends[0] - 1]
            _x, weight, ids, _weights, scores = (
                program.buffers[number] for number in router.arguments
            )
            self._experts = weight.shape[0]
            self.count = min(2 * ids.shape[1], self._experts)
            self._first = -(-program.chunk_sizes[-1] // _ROWS_ALIGNED) * _ROWS_ALIGNED
            self._row_bytes = artifact.model.vocab_size * 4
            self._ids_bytes, self._scores_bytes = (
                aligned(math.prod(buffer.shape) * 4) for buffer in (ids, scores)
            )
            self._padded = scores.shape[1]
            self._rows = -(-self._place(self.layers) // self._row_bytes)
            self.artifact = copy.copy(artifact)
            self.artifact.program = self._extended(program)

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
        and scores."""
        return layer * (2 * self._ids_bytes + self._scores_bytes)

    def _extended(self, program: Program) -> EncodedProgram:
        buffers = list(program.buffers)
        start = self._first * self._row_bytes

        def place(number: int, offset: int) -> int:
            """A buffer like the one of this number, after the logits."""
            buffers.append(replace(buffers[number], section=Section.LOGITS, offset=start + offset))
            return len(buffers) - 1

        sequences = []
        for sequence in program.sequences:
            steps = list(sequence.steps)
            ends = _ends(sequence) if sequence.role == "batch" else []
            for layer, end in reversed([*enumerate(ends)]):
                acquire, norm, router, _expect = steps[end + 1 - _GROUP : end + 1]
                x, weight, ids, weights, scores = router.arguments
                at = self._place(layer)
                results = (
                    place(ids, at),
                    place(weights, at + self._ids_bytes),
                    place(scores, at + 2 * self._ids_bytes),
                )
                steps[end + 1 - _GROUP : end + 1] = [
                    replace(norm, kind=StepKind.CALL),
                    replace(router, kind=StepKind.CALL, arguments=(x, weight, *results)),
                    acquire,
                ]
            sequences.append(replace(sequence, steps=tuple(steps)))
        sizes = {**program.section_bytes, "logits": start + self._rows * self._row_bytes}
        extended = replace(
            program, buffers=tuple(buffers), section_bytes=sizes, sequences=tuple(sequences)
        )
        return extended.encode()


def _ends(sequence: Sequence) -> list[int]:
    """Which steps expect experts."""
    return [at for at, step in enumerate(sequence.steps) if step.kind is StepKind.EXPECT_EXPERTS]
