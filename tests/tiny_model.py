"""A tiny model with recurrent state, KV cache and experts: its artifact, and what it computes."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from emberd.daemon.artifact_writer import ArtifactWriter
from emberd.daemon.logits import Logits
from emberd.daemon.manifest import ModelDescription
from emberd.daemon.program import Buffer, Program, Section, Step, StepKind
from emberd.daemon.program import Sequence as Steps

VOCABULARY, HIDDEN, EXPERTS, SLOTS = 16, 16, 4, 6
CHUNKS = (1, 4, 32)
TABLE = (5, 0, 3, 1)  # expert -> slot of the bank
ROW = HIDDEN * 4
MAX_CONTEXT = 4096
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3, 3, 8, 3, 2]


def _vector(seed: int, count: int) -> list[float]:
    """Small multiples of 1/8: sums of a few are exact in float32."""
    return [((seed * 7 + i * 5) % 17 - 8) / 8 for i in range(count)]


EMBEDDING = [_vector(token, HIDDEN) for token in range(VOCABULARY)]
HEAD = [_vector(100 + token, HIDDEN) for token in range(VOCABULARY)]
BANK = [_vector(200 + slot, HIDDEN) for slot in range(SLOTS)]


def _floats(rows: Sequence[Sequence[float]]) -> bytes:
    return b"".join(struct.pack(f"<{len(row)}f", *row) for row in rows)


def tiny_logits(tokens: Sequence[int]) -> list[list[float]]:
    """The specification of the tiny model: logits of every position, in float64."""
    state, cache = [0.0] * HIDDEN, [0.0] * HIDDEN
    result = []
    for token in tokens:
        state = [s / 2 + x for s, x in zip(state, EMBEDDING[token], strict=True)]
        cache = [c + s for c, s in zip(cache, state, strict=True)]
        first, second = BANK[TABLE[token % 4]], BANK[TABLE[token // 3]]
        out = [c * a * b for c, a, b in zip(cache, first, second, strict=True)]
        result.append([sum(o * w for o, w in zip(out, row, strict=True)) for row in HEAD])
    return result


def tiny_program() -> Program:
    """embed, accumulate (STATE), remember (KV), choose, acquire_experts, apply_experts, head."""
    symbols = ("embed", "accumulate", "remember", "choose", "apply_experts", "head")
    most = CHUNKS[-1]
    buffers = [
        Buffer(Section.WEIGHTS, "float32", (VOCABULARY, HIDDEN), 0),
        Buffer(Section.WEIGHTS, "float32", (VOCABULARY, HIDDEN), 4096),
        Buffer(Section.EXPERTS, "float32", (SLOTS, HIDDEN), 0),
        Buffer(Section.TABLES, "int32", (EXPERTS,), 0),
        Buffer(Section.STATE, "float32", (HIDDEN,), 64),
        Buffer(Section.KV, "float32", (-1, HIDDEN), ROW),
    ]
    embedding, head, bank, table, state, cache = range(6)
    sequences = []
    for tokens in CHUNKS:
        base, rows = len(buffers), int(tokens > 1)
        buffers += [
            Buffer(Section.TOKENS, "int32", (tokens,), 0, rows),
            Buffer(Section.POSITIONS, "int32", (tokens,), 0, rows),
            Buffer(Section.SCRATCH, "float32", (tokens, HIDDEN), 0, rows),
            Buffer(Section.SCRATCH, "float32", (tokens, HIDDEN), most * ROW, rows),
            Buffer(Section.SCRATCH, "int32", (tokens, 2), 2 * most * ROW, rows),
            Buffer(Section.SCRATCH, "float32", (1, HIDDEN), most * ROW),
            Buffer(Section.LOGITS, "float32", (1, VOCABULARY), 0),
            Buffer(Section.LOGITS, "float32", (tokens, VOCABULARY), 0, rows),
            Buffer(Section.SCRATCH, "float32", (tokens, 2), 2 * most * ROW + most * 8, rows),
            Buffer(Section.SCRATCH, "float32", (tokens, EXPERTS), 2 * most * (ROW + 8), rows),
        ]
        ids, positions, x, y, chosen, last, logits_last, logits_all = range(base, base + 8)
        weights, scores = base + 8, base + 9
        body = [
            (StepKind.CALL, 0, (ids, embedding, x)),
            (StepKind.CALL, 1, (x, state, y)),
            (StepKind.CALL, 2, (y, positions, cache, x)),
            (StepKind.CALL, 3, (ids, chosen, weights, scores)),
            (StepKind.ACQUIRE_EXPERTS, 0, (chosen, weights, scores, table, bank)),
            (StepKind.CALL, 4, (x, chosen, table, bank, x)),
        ]
        batch = [
            (StepKind.CALL_EACH if symbol in (1, 2) else kind, symbol, arguments)
            for kind, symbol, arguments in body
        ]
        tail = [
            (StepKind.TAKE_LAST_ROW, 0, (x, last)),
            (StepKind.CALL, 5, (last, head, logits_last)),
        ]
        whole = [(StepKind.CALL, 5, (x, head, logits_all))]
        for role, steps in (
            ("body", body),
            ("logits_last", tail if rows else whole),
            ("logits_all", whole),
            ("batch", batch),
        ):
            sequences.append(Steps(tokens, role, tuple(Step(*step) for step in steps)))
    return Program(
        symbols=symbols,
        chunk_sizes=CHUNKS,
        buffers=tuple(buffers),
        section_bytes={
            "scratch": 2 * most * (ROW + 8) + most * EXPERTS * 4,
            "state": 64 + ROW,
            "kv_per_token": 2 * ROW,
            "logits": most * VOCABULARY * 4,
            "bounds": 0,
            "tokens": most * 4,
            "positions": most * 4,
        },
        tables=struct.pack(f"<{EXPERTS}i", *TABLE),
        sequences=tuple(sequences),
    )


TINY_DESCRIPTION = ModelDescription(
    name="tiny",
    architecture="test",
    vocab_size=VOCABULARY,
    hidden_size=HIDDEN,
    layers=1,
    max_context=MAX_CONTEXT,
    stop_tokens=(0,),
    recipe="f32",
    details={},
)


@dataclass(frozen=True)
class TinyModel:
    """Writes tiny artifacts. `kernels`: bytes of the kernel library."""

    kernels: bytes
    program: Program
    logits: Callable[[Sequence[int]], list[list[float]]] = tiny_logits

    def write(
        self, path: Path, program: Program | None = None, cpu_features: Sequence[str] = ()
    ) -> Path:
        """An artifact at `path`, of the tiny program unless another one is given."""
        with ArtifactWriter(path, TINY_DESCRIPTION, target="test") as writer:
            self.fill(writer, program, cpu_features)
        return path

    def fill(
        self,
        writer: ArtifactWriter,
        program: Program | None = None,
        cpu_features: Sequence[str] = (),
    ) -> None:
        """Writes the files of an artifact."""
        writer.write_program(program or self.program)
        writer.add_kernels("generic", cpu_features, self.kernels)
        with writer.open_file("weights.bin") as file:
            file.write(_floats(EMBEDDING).ljust(4096, b"\0"))
            file.write(_floats(HEAD))
        with writer.open_file("experts.bin") as file:
            file.write(_floats(BANK))
        writer.write_file("tokenizer.json", b"{}")

    def with_steps(self, tokens: int, role: str, steps: Sequence[Step]) -> Program:
        """The tiny program with other steps in one sequence."""
        sequences = tuple(
            Steps(s.tokens, s.role, tuple(steps)) if (s.tokens, s.role) == (tokens, role) else s
            for s in self.program.sequences
        )
        return replace(self.program, sequences=sequences)


def last_row(logits: Logits | None) -> list[float]:
    """The logits of the last position."""
    assert logits is not None
    rows: list[list[float]] = logits.memory().tolist()  # type: ignore[assignment]
    return rows[-1]
