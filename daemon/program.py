"""The program of an artifact: a compiled step as data, and its serialised form (program.msgpack).

A program is a table of buffers (where each tensor lives) and, per chunk size, flat sequences of
steps over them: calls of a kernel by symbol, and the hand-over points where experts are acquired.
`Program` is the readable form that the compiler writes; `EncodedProgram` is the same with its
tables still packed, which is what the core takes: decoding thousands of steps into Python objects
would cost more than the first token may.

Here only the structure is checked. Every value in the packed tables (ids, offsets, ends) is
checked by the core when a model is opened, in one place, next to the memory it protects.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise

import msgpack
from emberd.daemon.errors import EmberdError
from emberd.daemon.record import INT64_MAX, Record

PROGRAM_VERSION = 6
BUFFER_FIELDS = 8
LARGEST_CHUNK = 1 << 16
BOUND_BLOCK = 64  # logits that share a bound
SECTION_SIZES = ("scratch", "state", "kv_per_token", "logits", "bounds", "tokens", "positions")
ROLES = ("body", "logits_last", "logits_all", "batch")


class Section(IntEnum):
    """Where a buffer lives; its offset is in bytes from the start of the section."""

    WEIGHTS = 0  # weights.bin, read-only
    EXPERTS = 1  # experts.bin, read-only
    SCRATCH = 2  # one per model, no content survives a step
    STATE = 3  # one per session, zero when it opens
    KV = 4  # one per session; first dimension -1 = capacity; the offset is in bytes per token
    TOKENS = 5  # i32[T], written by the core
    POSITIONS = 6  # i32[T], written by the core
    LOGITS = 7  # f32, what the caller reads
    TABLES = 8  # i32, one per model, initial content in the program
    BOUNDS = 9  # f32, what no logit of a block exceeds, for each row of logits; empty where unknown


class StepKind(IntEnum):
    """What a step does with its arguments."""

    CALL = 0  # call kernel `symbol` with the buffers
    ACQUIRE_EXPERTS = 1  # layer `symbol`, (ids, weights, scores, table, bank): makes them resident
    CALL_EACH = 2  # call kernel `symbol` for each token, with its rows and its own session
    TAKE_LAST_ROW = 3  # (rows, one row): copy the last token's row
    CALL_IN_WAVES = 4  # call kernel `symbol` for parts of the experts acquired last, once for each
    CALL_AHEAD = 5  # call kernel `symbol`, after ACQUIRE_EXPERTS, if the next layer's are expected
    EXPECT_EXPERTS = (
        6  # layer `symbol`, the next to acquire, (ids): what it may choose, after those
    )


# DLPack type code and bits; one lane.
DTYPES: dict[str, tuple[int, int]] = {
    "int8": (0, 8),
    "int16": (0, 16),
    "int32": (0, 32),
    "int64": (0, 64),
    "uint8": (1, 8),
    "float16": (2, 16),
    "float32": (2, 32),
}
_DTYPE_NAMES = {code: name for name, code in DTYPES.items()}


@dataclass(frozen=True)
class Buffer:
    """A contiguous row-major tensor: `shape` of `dtype` at `offset` bytes of `section`.

    `token_rows`: how much of the first dimension belongs to each token. A step of fewer tokens
    than the sequence was compiled for uses so much less of it. 0: the dimension is fixed.
    """

    section: Section
    dtype: str
    shape: tuple[int, ...]
    offset: int
    token_rows: int = 0


@dataclass(frozen=True)
class Step:
    """One step: `symbol` is a kernel's index (CALL) or a layer (ACQUIRE_EXPERTS)."""

    kind: StepKind
    symbol: int
    arguments: tuple[int, ...]


@dataclass(frozen=True)
class Sequence:
    """The steps that do `role` (one of ROLES) for a chunk of up to `tokens` tokens.

    body: all blocks but the head; logits_last and logits_all: the head, after it; batch: the body
    for tokens that each continue a session of their own. Only bodies have to be there.
    """

    tokens: int
    role: str
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class EncodedProgram:
    """A program with its tables packed: what the core reads. Only the structure is checked.

    `buffers`: int64 x 8 each; `shapes`: int64; `sequences`: (tokens, role, int32 steps).
    """

    symbols: tuple[str, ...]
    chunk_sizes: tuple[int, ...]
    buffers: bytes
    shapes: bytes
    section_bytes: Mapping[str, int]
    tables: bytes
    sequences: tuple[tuple[int, str, bytes], ...]

    @classmethod
    def from_bytes(cls, data: bytes) -> EncodedProgram:
        """Reads program.msgpack; EmberdError says which field is not as it must be."""
        try:
            top = msgpack.unpackb(data)
        except (ValueError, msgpack.exceptions.UnpackException, RecursionError) as error:
            raise EmberdError(f"program.msgpack is not readable: {error}") from error
        record = Record(top, "program")
        version = top.get("version")
        if version != PROGRAM_VERSION:
            raise EmberdError(
                f"program version {version!r}, this emberd reads {PROGRAM_VERSION}: "
                "rebuild the artifact with a matching emberc"
            )
        symbols = record.strings("symbols")
        for symbol in symbols:
            if not (symbol.isascii() and symbol.isidentifier()):
                raise EmberdError(f"program: kernel symbol {symbol!r} is not a C identifier")
        chunks = record.integers("chunk_sizes", 1, LARGEST_CHUNK)
        if not chunks or any(a >= b for a, b in pairwise(chunks)):
            raise EmberdError(f"program: chunk sizes {list(chunks)} are not ascending")
        sizes = record.record("section_bytes")
        return cls(
            symbols=symbols,
            chunk_sizes=chunks,
            buffers=record.packed("buffers", 8 * BUFFER_FIELDS),
            shapes=record.packed("shapes", 8),
            section_bytes={name: sizes.integer(name, 0, INT64_MAX) for name in SECTION_SIZES},
            tables=record.packed("tables", 4),
            sequences=_sequences(record.records("sequences"), chunks),
        )

    def to_bytes(self) -> bytes:
        """program.msgpack; equal programs give equal bytes."""
        top = {
            "version": PROGRAM_VERSION,
            "symbols": list(self.symbols),
            "chunk_sizes": list(self.chunk_sizes),
            "buffers": self.buffers,
            "shapes": self.shapes,
            "section_bytes": {name: self.section_bytes[name] for name in SECTION_SIZES},
            "tables": self.tables,
            "sequences": [
                {"tokens": tokens, "role": role, "steps": steps}
                for tokens, role, steps in self.sequences
            ],
        }
        packed: bytes = msgpack.packb(top)
        return packed


@dataclass(frozen=True)
class Program:
    """A program in readable form.

    `section_bytes`: bytes of each of SECTION_SIZES; `tables`: initial bytes of TABLES (int32).
    """

    symbols: tuple[str, ...]
    chunk_sizes: tuple[int, ...]
    buffers: tuple[Buffer, ...]
    section_bytes: Mapping[str, int]
    tables: bytes
    sequences: tuple[Sequence, ...]

    def encode(self) -> EncodedProgram:
        """Packs the tables."""
        shapes: list[int] = []
        rows: list[int] = []
        for buffer in self.buffers:
            code, bits = DTYPES[buffer.dtype]
            ndim, index = len(buffer.shape), len(shapes)
            rows += [
                *(int(buffer.section), code, bits, ndim),
                *(buffer.offset, buffer.token_rows, index, 0),
            ]
            shapes += buffer.shape
        return EncodedProgram(
            symbols=tuple(self.symbols),
            chunk_sizes=tuple(self.chunk_sizes),
            buffers=struct.pack(f"<{len(rows)}q", *rows),
            shapes=struct.pack(f"<{len(shapes)}q", *shapes),
            section_bytes=dict(self.section_bytes),
            tables=bytes(self.tables),
            sequences=tuple((s.tokens, s.role, _pack_steps(s.steps)) for s in self.sequences),
        )

    @classmethod
    def decode(cls, encoded: EncodedProgram) -> Program:
        """Unpacks the tables; EmberdError where a table does not hold together."""
        shapes = struct.unpack(f"<{len(encoded.shapes) // 8}q", encoded.shapes)
        return cls(
            symbols=encoded.symbols,
            chunk_sizes=encoded.chunk_sizes,
            buffers=tuple(
                _buffer(index, fields, shapes)
                for index, fields in enumerate(
                    struct.iter_unpack(f"<{BUFFER_FIELDS}q", encoded.buffers)
                )
            ),
            section_bytes=encoded.section_bytes,
            tables=encoded.tables,
            sequences=tuple(
                Sequence(tokens, role, _unpack_steps(steps))
                for tokens, role, steps in encoded.sequences
            ),
        )

    def to_bytes(self) -> bytes:
        """program.msgpack; equal programs give equal bytes."""
        return self.encode().to_bytes()

    @classmethod
    def from_bytes(cls, data: bytes) -> Program:
        """Reads program.msgpack; EmberdError when it is not one."""
        return cls.decode(EncodedProgram.from_bytes(data))


def _sequences(
    records: list[Record], chunks: tuple[int, ...]
) -> tuple[tuple[int, str, bytes], ...]:
    sequences = []
    for record in records:
        role = record.string("role")
        if role not in ROLES:
            raise EmberdError(f"program: role {role!r:.80}, expected one of {', '.join(ROLES)}")
        tokens = record.integer("tokens", 1, LARGEST_CHUNK)
        sequences.append((tokens, role, record.packed("steps", 4)))
    found = {(tokens, role) for tokens, role, _ in sequences}
    bodies = {(tokens, "body") for tokens in chunks}
    if len(found) < len(sequences) or not bodies <= found or not {t for t, _ in found} <= {*chunks}:
        raise EmberdError(
            "program: expected a body per chunk size, and each other role once at most"
        )
    return tuple(sequences)


def _buffer(index: int, fields: tuple[int, ...], shapes: tuple[int, ...]) -> Buffer:
    section, code, bits, ndim, offset, token_rows, shape, _ = fields
    name = _DTYPE_NAMES.get((code, bits))
    if name is None or not 0 <= section < len(Section):
        raise EmberdError(f"program: buffer {index} has an unknown section or dtype")
    if ndim < 0 or shape < 0 or shape + ndim > len(shapes):
        raise EmberdError(f"program: buffer {index} has its shape outside the shape table")
    return Buffer(Section(section), name, shapes[shape : shape + ndim], offset, token_rows)


def _pack_steps(steps: tuple[Step, ...]) -> bytes:
    words: list[int] = []
    for step in steps:
        words += [int(step.kind), step.symbol, len(step.arguments), *step.arguments]
    return struct.pack(f"<{len(words)}i", *words)


def _unpack_steps(data: bytes) -> tuple[Step, ...]:
    words = struct.unpack(f"<{len(data) // 4}i", data)
    steps = []
    at = 0
    while at < len(words):
        kind, symbol, count = words[at : at + 3] if at + 3 <= len(words) else (-1, 0, 0)
        end = at + 3 + count
        if kind not in set(StepKind) or not at + 3 <= end <= len(words):
            raise EmberdError(f"program: step at word {at} is cut short or of unknown kind {kind}")
        steps.append(Step(StepKind(kind), symbol, words[at + 3 : end]))
        at = end
    return tuple(steps)
