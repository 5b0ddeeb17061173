"""Bytes of a decoded token, counted by hand for a program of every kind of buffer."""

from __future__ import annotations

import pytest
from emberd.compile.traffic import decode_traffic
from emberd.daemon.program import Buffer, Program, Section, Sequence, Step, StepKind

VOCABULARY, HIDDEN = 100, 8
TABLE, NORM, HEAD, BANK, IDS, EXPERT_TABLE, STATE, CACHE, TOKENS, X, LOGITS = range(11)
BUFFERS = (
    Buffer(Section.WEIGHTS, "uint8", (VOCABULARY * HIDDEN,), 0),
    Buffer(Section.WEIGHTS, "float32", (HIDDEN,), 0),
    Buffer(Section.WEIGHTS, "float16", (VOCABULARY, HIDDEN), 0),
    Buffer(Section.EXPERTS, "uint8", (6, 500), 0),
    Buffer(Section.SCRATCH, "int32", (1, 2), 0),
    Buffer(Section.TABLES, "int32", (6,), 0),
    Buffer(Section.STATE, "float32", (3, HIDDEN), 0),
    Buffer(Section.KV, "float16", (-1, HIDDEN), 0),
    Buffer(Section.TOKENS, "int32", (1,), 0),
    Buffer(Section.SCRATCH, "float32", (1, HIDDEN), 0),
    Buffer(Section.LOGITS, "float32", (1, VOCABULARY), 0),
)
SYMBOLS = ("embed", "mix", "experts", "head", "prefill_only")


def call(symbol: str, *arguments: int) -> Step:
    return Step(StepKind.CALL, SYMBOLS.index(symbol), arguments)


BODY = (
    call("embed", TOKENS, TABLE, X),
    call("mix", X, NORM, STATE, CACHE, X),
    call("mix", X, NORM, STATE, CACHE, X),
    Step(StepKind.ACQUIRE_EXPERTS, 0, (IDS, EXPERT_TABLE, BANK)),
    call("experts", X, IDS, EXPERT_TABLE, BANK, X),
)
TAKE_LAST = Step(StepKind.TAKE_LAST_ROW, 0, (X, X))
PROGRAM = Program(
    symbols=SYMBOLS,
    chunk_sizes=(1, 8),
    buffers=BUFFERS,
    section_bytes={},
    tables=b"",
    sequences=(
        Sequence(1, "body", BODY),
        Sequence(1, "logits_last", (TAKE_LAST, call("head", X, HEAD, LOGITS))),
        Sequence(1, "batch", BODY),
        Sequence(1, "logits_all", (call("head", X, HEAD, LOGITS),)),
        Sequence(8, "body", (call("prefill_only", X, HEAD, X),)),
    ),
)


@pytest.mark.parametrize("context", [0, 1, 700])
def test_counts_what_a_token_needs(context: int) -> None:
    traffic = decode_traffic(PROGRAM, VOCABULARY, context)
    cache = (context + 1) * HIDDEN * 2
    assert traffic.by_symbol == {
        "embed": HIDDEN,
        "mix": 2 * (HIDDEN * 4 + 2 * 3 * HIDDEN * 4 + cache),
        "experts": 2 * 500,
        "head": VOCABULARY * HIDDEN * 2,
    }
    assert traffic.by_section == {
        Section.WEIGHTS: HIDDEN + 2 * HIDDEN * 4 + VOCABULARY * HIDDEN * 2,
        Section.EXPERTS: 2 * 500,
        Section.STATE: 2 * 2 * 3 * HIDDEN * 4,
        Section.KV: 2 * cache,
    }
    assert traffic.total == sum(traffic.by_symbol.values())
