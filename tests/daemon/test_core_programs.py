"""Programs that the core must refuse when a model is opened, whatever they hold."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from emberd.daemon.artifact import Artifact
from emberd.daemon.core import Model
from emberd.daemon.errors import EmberdError
from emberd.daemon.program import ROLES, Buffer, Program, Section, Step, StepKind
from emberd.daemon.program import Sequence as Steps
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

HUGE = 2**62
EMBED = Step(StepKind.CALL, 0, (6, 0, 8))


def with_buffer(tiny: Any, **changes: Any) -> Program:
    """The tiny program, its first buffer changed."""
    first, *rest = tiny.program.buffers
    program: Program = tiny.program
    return replace(program, buffers=(replace(first, **changes), *rest))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"offset": 4096 + 64}, "ends outside section 0"),
        ({"offset": -64}, "starts at -64"),
        ({"offset": 4}, "not a multiple of 64"),
        ({"offset": 2**63 - 64}, "ends outside"),
        ({"shape": (HUGE, 16)}, "impossible shape"),
        ({"shape": (HUGE, HUGE)}, "impossible shape"),
        ({"shape": (0, 16)}, "impossible shape"),
        ({"shape": (-1, 16)}, "impossible shape"),
        ({"shape": (1,) * 9}, "outside the shape table"),
        ({"section": Section.KV, "shape": (16, 16)}, "impossible shape"),
        ({"section": Section.KV, "shape": (-1, -1)}, "impossible shape"),
        ({"section": Section.KV, "shape": (-1, 100)}, "ends outside section 4"),
        ({"section": Section.STATE}, "ends outside section 3"),
        ({"section": Section.TABLES}, "ends outside section 8"),
        ({"token_rows": 1}, "cannot have 1 rows for each token"),
        ({"section": Section.STATE, "token_rows": 1}, "cannot have 1 rows for each token"),
        ({"section": Section.SCRATCH, "token_rows": -1}, "cannot have -1 rows"),
        ({"section": Section.SCRATCH, "token_rows": 3}, "cannot have 3 rows"),
        ({"section": Section.SCRATCH, "token_rows": 32}, "cannot have 32 rows"),
        ({"section": Section.SCRATCH, "shape": (), "token_rows": 1}, "cannot have 1 rows"),
    ],
)
def test_bad_buffers(tiny: Any, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    artifact = Artifact.open(tiny.write(tmp_path / "a", with_buffer(tiny, **changes)))
    with pytest.raises(EmberdError, match=message):
        Model(artifact)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (replace(EMBED, arguments=(6, 0, 1000)), "uses buffer 1000 of"),
        (replace(EMBED, arguments=(6, 0, -1)), "uses buffer -1 of"),
        (replace(EMBED, arguments=(0,) * 65), "cut short"),
        (replace(EMBED, symbol=6), "calls kernel 6 of 6"),
        (replace(EMBED, symbol=-1), "calls kernel -1 of 6"),
        (Step(StepKind.ACQUIRE_EXPERTS, 0, (0, 3, 2)), "acquire_experts of layer 0 takes"),
        (Step(StepKind.ACQUIRE_EXPERTS, 0, (10, 3)), "acquire_experts of layer 0 takes"),
        (Step(StepKind.ACQUIRE_EXPERTS, 0, (20, 24, 3, 2)), "acquire_experts of layer 0 takes"),
        (Step(StepKind.ACQUIRE_EXPERTS, 0, (20, 10, 25, 3, 2)), "acquire_experts of layer 0 takes"),
        (Step(StepKind.ACQUIRE_EXPERTS, 0, (20, 14, 25, 3, 2)), "acquire_experts of layer 0 takes"),
        (Step(StepKind.ACQUIRE_EXPERTS, 0, (20, 24, 15, 3, 2)), "acquire_experts of layer 0 takes"),
        (Step(StepKind.ACQUIRE_EXPERTS, 0, (20, 24, 24, 3, 2)), "acquire_experts of layer 0 takes"),
        (
            Step(StepKind.ACQUIRE_EXPERTS, 0, (20, 24, 25, 3, 24)),
            "acquire_experts of layer 0 takes",
        ),
        (
            Step(StepKind.ACQUIRE_EXPERTS, 0, (20, 24, 25, 20, 2)),
            "acquire_experts of layer 0 takes",
        ),
        (Step(StepKind.ACQUIRE_EXPERTS, -1, (20, 24, 25, 3, 2)), "layer -1, expected 0 to 4095"),
        (
            Step(StepKind.ACQUIRE_EXPERTS, 4096, (20, 24, 25, 3, 2)),
            "layer 4096, expected 0 to 4095",
        ),
        (Step(StepKind.CALL_EACH, 6, (6, 0, 8)), "calls kernel 6 of 6"),
        (Step(StepKind.CALL_IN_WAVES, 0, (16, 0, 18)), "in waves, but no step before it acquires"),
        (Step(StepKind.CALL_AHEAD, 0, (16, 0, 18)), "called ahead stands between acquired and"),
        (Step(StepKind.EXPECT_EXPERTS, 0, (20,)), "called ahead stands between acquired and"),
        (Step(StepKind.TAKE_LAST_ROW, 0, (8,)), "the last row is taken"),
        (Step(StepKind.TAKE_LAST_ROW, 0, (8, 9)), "the last row is taken"),
        (Step(StepKind.TAKE_LAST_ROW, 0, (18, 4)), "the last row is taken"),
    ],
)
def test_bad_steps(tiny: Any, tmp_path: Path, step: Step, message: str) -> None:
    artifact = Artifact.open(tiny.write(tmp_path / "a", tiny.with_steps(4, "body", [step])))
    with pytest.raises(EmberdError, match=message):
        Model(artifact)


ACQUIRE = Step(StepKind.ACQUIRE_EXPERTS, 0, (20, 24, 25, 3, 2))
CALL = Step(StepKind.CALL, 0, (16, 0, 18))
AHEAD = replace(CALL, kind=StepKind.CALL_AHEAD)
EXPECT = Step(StepKind.EXPECT_EXPERTS, 0, (20,))


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([ACQUIRE, AHEAD], "a sequence ends, but experts are still expected"),
        ([ACQUIRE, EXPECT], "a sequence ends, but experts are still expected"),
        ([ACQUIRE, AHEAD, CALL], "called ahead stands between acquired and"),
        ([ACQUIRE, CALL, AHEAD], "called ahead stands between acquired and"),
        ([ACQUIRE, EXPECT, EXPECT], "called ahead stands between acquired and"),
        ([ACQUIRE, replace(AHEAD, symbol=6), EXPECT, ACQUIRE], "calls kernel 6 of 6"),
        ([ACQUIRE, replace(EXPECT, symbol=1), ACQUIRE], "layer 0, but those of layer 1 are exp"),
        ([ACQUIRE, replace(EXPECT, arguments=(20, 20)), ACQUIRE], "expect_experts of layer 0 tak"),
        ([ACQUIRE, replace(EXPECT, arguments=(18,)), ACQUIRE], "expect_experts of layer 0 takes"),
    ],
)
def test_bad_expectations(tiny: Any, tmp_path: Path, steps: list[Step], message: str) -> None:
    artifact = Artifact.open(tiny.write(tmp_path / "a", tiny.with_steps(4, "body", steps)))
    with pytest.raises(EmberdError, match=message):
        Model(artifact)
    good = tiny.with_steps(4, "body", [ACQUIRE, AHEAD, EXPECT, CALL, ACQUIRE])
    with Model(Artifact.open(tiny.write(tmp_path / "b", good))):
        pass


def test_layers_whose_experts_differ(tiny: Any, tmp_path: Path) -> None:
    step = Step(StepKind.ACQUIRE_EXPERTS, 1, (20, 24, 25, len(tiny.program.buffers), 2))
    program = tiny.with_steps(4, "body", [step])
    buffers = (*program.buffers, Buffer(Section.TABLES, "int32", (2,), 0))
    artifact = Artifact.open(tiny.write(tmp_path / "a", replace(program, buffers=buffers)))
    with pytest.raises(EmberdError, match="acquire_experts of layer 1 is unlike the one before"):
        Model(artifact)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("logits", "ends outside section 7"),
        ("tokens", "ends outside section 5"),
        ("scratch", "ends outside section 2"),
    ],
)
def test_sections_that_are_too_small(tiny: Any, tmp_path: Path, section: str, message: str) -> None:
    sizes = {**tiny.program.section_bytes, section: 64}
    artifact = Artifact.open(tiny.write(tmp_path / "a", replace(tiny.program, section_bytes=sizes)))
    with pytest.raises(EmberdError, match=message):
        Model(artifact)


def test_the_core_writes_only_into_sections_that_hold_its_input(tiny: Any, tmp_path: Path) -> None:
    """No buffer names these sections, yet the core fills them: they must be large enough."""
    kept = tuple(b for b in tiny.program.buffers if b.section is Section.WEIGHTS)
    program = Program(
        symbols=tiny.program.symbols,
        chunk_sizes=(8,),
        buffers=kept,
        section_bytes=dict.fromkeys(tiny.program.section_bytes, 0),
        tables=b"",
        sequences=tuple(Steps(8, role, ()) for role in ROLES),
    )
    for section, message in (
        (None, "token and position sections are too small"),
        ("tokens", "token and position sections are too small"),
        ("positions", "logits section has 0 bytes"),
    ):
        if section:
            program.section_bytes[section] = 32  # type: ignore[index]
        with pytest.raises(EmberdError, match=message):
            Model(Artifact.open(tiny.write(tmp_path / "a", program)))


@settings(deadline=None, max_examples=300, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_damaged_program_opens_or_is_refused(
    tiny: Any, tiny_artifact: Artifact, data: st.DataObject
) -> None:
    """Whatever an encoded program holds, opening it works or raises EmberdError."""
    encoded = tiny.program.encode()
    table = data.draw(st.sampled_from(["buffers", "shapes", "steps"]))
    raw = bytearray(encoded.sequences[0][2] if table == "steps" else getattr(encoded, table))
    size = 4 if table == "steps" else 8
    limit = 2 ** (8 * size - 1)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(raw) // size - 1)) * size
        value = data.draw(st.integers(-limit, limit - 1) | st.integers(-2, 70))
        raw[at : at + size] = value.to_bytes(size, "little", signed=True)
    if table == "steps":
        (tokens, role, _), *others = encoded.sequences
        encoded = replace(encoded, sequences=((tokens, role, bytes(raw)), *others))
    else:
        encoded = replace(encoded, **{table: bytes(raw)})
    artifact = copy(tiny_artifact)
    artifact.program = encoded
    try:
        Model(artifact, threads=1).close()
    except EmberdError as error:
        assert "program: " in str(error)
