"""How many bytes a decoded token moves between memory and the cores, from the program's buffers.

Counted is what must be read or written at least once: weights whole (of a table that token ids
look up, one row), the chosen experts, the recurrent state twice (read and written), and the KV
cache of all tokens so far. Activations stay in cache and count nothing.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from emberd.daemon.program import DTYPES, Buffer, Program, Section, StepKind


@dataclass(frozen=True)
class Traffic:
    """Bytes of one decoded token: in all by section, and by kernel symbol."""

    by_section: Mapping[Section, float]
    by_symbol: Mapping[str, float]

    @property
    def total(self) -> float:
        return sum(self.by_section.values())


def decode_traffic(program: Program, vocab_size: int, context: int) -> Traffic:
    """Of one token that follows `context` others, logits included."""
    by_section: defaultdict[Section, float] = defaultdict(float)
    by_symbol: defaultdict[str, float] = defaultdict(float)
    for symbol, section, size in _uses(program, vocab_size, context):
        by_section[section] += size
        by_symbol[symbol] += size
    return Traffic(by_section, by_symbol)


def _uses(program: Program, vocab_size: int, context: int) -> Iterator[tuple[str, Section, float]]:
    """Every buffer that a kernel of a decode step moves: (symbol, section, bytes)."""
    for sequence in program.sequences:
        if sequence.tokens != 1 or sequence.role not in ("body", "logits_last"):
            continue
        chosen = 0
        for step in sequence.steps:
            buffers = [program.buffers[argument] for argument in step.arguments]
            if step.kind is StepKind.ACQUIRE_EXPERTS:
                chosen = math.prod(buffers[0].shape)
            if step.kind is not StepKind.CALL:
                continue
            looks_up = any(buffer.section is Section.TOKENS for buffer in buffers)
            share = {
                Section.WEIGHTS: 1 / vocab_size if looks_up else 1,
                Section.EXPERTS: chosen,
                Section.STATE: 2,
                Section.KV: context + 1,
            }
            for buffer in buffers:
                if buffer.section in share:
                    size = _unit_bytes(buffer) * share[buffer.section]
                    yield program.symbols[step.symbol], buffer.section, size


def _unit_bytes(buffer: Buffer) -> int:
    """Bytes of a buffer; of experts and KV cache, those of one expert and of one token."""
    repeated = buffer.section in (Section.EXPERTS, Section.KV)
    shape = buffer.shape[1:] if repeated else buffer.shape
    return math.prod(shape) * DTYPES[buffer.dtype][1] // 8
