"""Programs: what is written is read, and damage is an EmberdError."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgpack
import pytest
from emberd.daemon.errors import EmberdError
from emberd.daemon.program import (
    DTYPES,
    ROLES,
    SECTION_SIZES,
    Buffer,
    EncodedProgram,
    Program,
    Section,
    Sequence,
    Step,
    StepKind,
)
from hypothesis import given, settings
from hypothesis import strategies as st

BUFFERS = st.builds(
    Buffer,
    section=st.sampled_from(Section),
    dtype=st.sampled_from(sorted(DTYPES)),
    shape=st.lists(st.integers(-1, 2**40), max_size=5).map(tuple),
    offset=st.integers(0, 2**50),
    token_rows=st.integers(0, 2**31 - 1),
)
STEPS = st.builds(
    Step,
    kind=st.sampled_from(StepKind),
    symbol=st.integers(0, 2**31 - 1),
    arguments=st.lists(st.integers(0, 2**31 - 1), max_size=9).map(tuple),
)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    chunks = tuple(sorted(draw(st.sets(st.integers(1, 512), min_size=1, max_size=4))))
    return Program(
        symbols=tuple(draw(st.lists(st.from_regex(r"\A[a-z_][a-z0-9_]{0,20}\Z"), max_size=4))),
        chunk_sizes=chunks,
        buffers=tuple(draw(st.lists(BUFFERS, max_size=6))),
        section_bytes={name: draw(st.integers(0, 2**40)) for name in SECTION_SIZES},
        tables=draw(st.binary(max_size=6)) * 4,
        sequences=tuple(
            Sequence(tokens, role, tuple(draw(st.lists(STEPS, max_size=4))))
            for tokens in chunks
            for role in ROLES
        ),
    )


SMALL = Program(
    symbols=("kernel",),
    chunk_sizes=(1,),
    buffers=(Buffer(Section.SCRATCH, "float32", (4, 4), 64),),
    section_bytes=dict.fromkeys(SECTION_SIZES, 128),
    tables=b"",
    sequences=tuple(Sequence(1, role, (Step(StepKind.CALL, 0, (0, 0)),)) for role in ROLES),
)


@settings(deadline=None, max_examples=60)
@given(programs())
def test_round_trip(program: Program) -> None:
    data = program.to_bytes()
    assert Program.from_bytes(data) == program
    assert EncodedProgram.from_bytes(data).to_bytes() == data


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, "program version 2, this emberd reads 6"),
        ({"symbols": "kernel"}, "symbols is not a list"),
        ({"symbols": ["a b"]}, "'a b' is not a C identifier"),
        ({"symbols": [b"a"]}, r"symbols\[0\] is not a string"),
        ({"chunk_sizes": []}, "not ascending"),
        ({"chunk_sizes": [4, 1]}, "not ascending"),
        ({"chunk_sizes": [0]}, r"chunk_sizes\[0\] is 0"),
        ({"chunk_sizes": [True]}, r"chunk_sizes\[0\] is True"),
        ({"chunk_sizes": [1, 2]}, "a body per chunk size"),
        ({"buffers": bytes(63)}, "buffers is not a packed table of 64-byte entries"),
        ({"shapes": bytes(7)}, "shapes is not a packed table"),
        ({"shapes": b""}, "shape outside the shape table"),
        ({"tables": [1]}, "tables is not a packed table"),
        ({"section_bytes": {}}, r"section_bytes\.scratch is None"),
        ({"section_bytes": dict.fromkeys(SECTION_SIZES, -1)}, "is -1"),
        ({"sequences": [1]}, r"sequences\[0\] is not a map"),
        ({"sequences": [{"tokens": 1, "role": "x", "steps": b""}]}, "role 'x'"),
        ({"sequences": []}, "a body per chunk size"),
    ],
)
def test_bad_fields(changes: dict[str, Any], message: str) -> None:
    top = msgpack.unpackb(SMALL.to_bytes()) | changes
    with pytest.raises(EmberdError, match=message):
        Program.from_bytes(msgpack.packb(top))


@pytest.mark.parametrize(
    "steps", [bytes(4), bytes([7, 0, 0, 0] + [0] * 8), bytes([0] * 8 + [9, 0, 0, 0])]
)
def test_steps_that_do_not_hold_together(steps: bytes) -> None:
    encoded = SMALL.encode()
    broken = replace(encoded, sequences=((1, "body", steps), *encoded.sequences[1:]))
    with pytest.raises(EmberdError, match="step at word 0 is cut short or of unknown kind"):
        Program.from_bytes(broken.to_bytes())


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_damage_is_an_emberd_error(data: st.DataObject) -> None:
    raw = bytearray(SMALL.to_bytes())
    if data.draw(st.booleans()):
        del raw[data.draw(st.integers(0, len(raw) - 1)) :]
    else:
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        Program.from_bytes(bytes(raw))
    except EmberdError as error:
        assert "program" in str(error)


@settings(deadline=None, max_examples=60)
@given(st.binary(max_size=200))
def test_any_bytes_are_an_emberd_error(raw: bytes) -> None:
    with pytest.raises(EmberdError):
        Program.from_bytes(raw)
