"""The core, driven through its Python face on the tiny model: results must equal its
specification exactly, however the tokens are cut, on any number of threads."""

from __future__ import annotations

import gc
import math
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from emberd.daemon.artifact import Artifact
from emberd.daemon.core import ContextOverflow, Logits, LogitsRole, Model, Session
from emberd.daemon.errors import EmberdError
from emberd.daemon.program import Program, Section, Step, StepKind
from emberd.daemon.program import Sequence as Steps
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3, 3, 8, 3, 2]
BAD_EXPERT = 13  # a token whose second expert does not exist


@pytest.fixture
def model(tiny_artifact: Artifact) -> Iterator[Model]:
    with Model(tiny_artifact, threads=2) as model:
        yield model


def last_row(logits: Logits | None) -> list[float]:
    assert logits is not None
    rows: list[list[float]] = logits.memory().tolist()  # type: ignore[assignment]
    return rows[-1]


def expected(tiny: Any, tokens: Sequence[int]) -> list[float]:
    """The specification's last row, rounded to float32 as the kernels' results are."""
    row = tiny.logits(tokens)[-1]
    return list(struct.unpack(f"{len(row)}f", struct.pack(f"{len(row)}f", *row)))


def run(session: Session, cuts: Sequence[int]) -> list[float]:
    """The last logits of PROMPT, cut as told."""
    start = 0
    for size in cuts:
        logits = session.step(PROMPT[start : start + size])
        start += size
    return last_row(logits)


def test_logits_of_every_position(tiny: Any, model: Model) -> None:
    with model.open_session(100) as session:
        logits = session.step([3, 1, 4, 1], LogitsRole.ALL)
        assert logits is not None
        assert logits.rows == 4
        assert logits.memory().tolist() == tiny.logits([3, 1, 4, 1])


@pytest.mark.parametrize("length", [1, 3, 4, 5, 29])
def test_prefill_continues_the_specification(tiny: Any, model: Model, length: int) -> None:
    with model.open_session(100) as session:
        row = last_row(session.prefill(PROMPT[:length]))
        assert row == pytest.approx(expected(tiny, PROMPT[:length]), rel=1e-5, abs=1e-5)
        assert session.length == length


@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.too_slow])
@given(cuts=st.lists(st.sampled_from([1, 4]), min_size=29))
def test_results_do_not_depend_on_the_cut(tiny_artifact: Artifact, cuts: list[int]) -> None:
    while sum(cuts) > len(PROMPT):
        cuts.pop()
    cuts += [1] * (len(PROMPT) - sum(cuts))
    with Model(tiny_artifact, threads=1) as model, model.open_session(64) as session:
        whole = run(session, [1] * len(PROMPT))
        session.reset()
        assert run(session, cuts) == whole


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_results_do_not_depend_on_threads(tiny_artifact: Artifact, threads: int) -> None:
    with Model(tiny_artifact, threads=1) as one, one.open_session(64) as session:
        single = last_row(session.prefill(PROMPT))
    with Model(tiny_artifact, threads=threads) as model, model.open_session(64) as session:
        assert model.threads == threads
        for _ in range(20):
            session.reset()
            assert last_row(session.prefill(PROMPT)) == single


def test_no_logits_when_not_asked(model: Model) -> None:
    with model.open_session(8) as session:
        assert session.step([1], LogitsRole.NONE) is None
        assert session.length == 1


def test_sessions_do_not_mix(tiny: Any, model: Model) -> None:
    with model.open_session(64) as first, model.open_session(80) as second:
        for i in range(8):
            a = last_row(first.step([PROMPT[i]]))
            b = last_row(second.step([PROMPT[i + 8]]))
        assert a == pytest.approx(expected(tiny, PROMPT[:8]), rel=1e-6, abs=1e-6)
        assert b == pytest.approx(expected(tiny, PROMPT[8:16]), rel=1e-6, abs=1e-6)


def test_sessions_in_threads_of_their_own(model: Model) -> None:
    results: dict[int, list[list[float]]] = {}

    def converse(index: int) -> None:
        with model.open_session(64) as session:
            for token in PROMPT[index:20]:
                session.step([token], LogitsRole.NONE)
            results[index] = [[session.length]]

    threads = [threading.Thread(target=converse, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {index: [[20 - index]] for index in range(6)}


def test_the_cache_grows_by_touching(tiny: Any, tmp_path: Path) -> None:
    big = replace(
        tiny.program, section_bytes={**tiny.program.section_bytes, "kv_per_token": 1 << 20}
    )
    artifact = Artifact.open(tiny.write(tmp_path / "big", big))
    with Model(artifact, threads=1) as model:
        before = resident_bytes()
        with model.open_session(4096) as session:  # 4 GB reserved
            session.prefill(PROMPT)
            assert resident_bytes() - before < 64 << 20


def test_reset_forgets(model: Model) -> None:
    with model.open_session(64) as session:
        fresh = last_row(session.prefill(PROMPT))
        session.reset()
        assert session.length == 0
        assert last_row(session.prefill(PROMPT)) == fresh


def test_snapshot_and_restore(model: Model) -> None:
    with model.open_session(64) as session:
        session.prefill(PROMPT[:12])
        snapshot = session.snapshot()
        assert (snapshot.length, snapshot.nbytes) == (12, model.state_bytes)
        first = last_row(session.prefill(PROMPT[12:]))
        session.restore(snapshot)
        assert session.length == 12
        session.prefill([7, 7, 7])
        session.restore(snapshot)
        assert last_row(session.prefill(PROMPT[12:])) == first


def test_a_snapshot_whose_cache_was_overwritten_is_refused(model: Model) -> None:
    with model.open_session(64) as session:
        session.prefill(PROMPT[:5])
        early = session.snapshot()
        session.prefill(PROMPT[5:10])
        late = session.snapshot()
        session.restore(early)
        session.restore(late)  # nothing was written in between
        session.restore(early)
        session.step([7])
        with pytest.raises(EmberdError, match="not of this session's history"):
            session.restore(late)
        session.restore(early)
        session.reset()
        with pytest.raises(EmberdError, match="not of this session's history"):
            session.restore(early)


def test_a_snapshot_of_another_session_is_refused(model: Model) -> None:
    with model.open_session(8) as first, model.open_session(8) as second:
        first.step([1])
        snapshot = first.snapshot()
        with pytest.raises(EmberdError, match="not of this session's history"):
            second.restore(snapshot)


def test_overflow_changes_nothing(model: Model) -> None:
    with model.open_session(6) as session:
        session.prefill(PROMPT[:5])
        with pytest.raises(ContextOverflow, match="the session has 5 of 6"):
            session.prefill([1, 2])
        assert session.length == 5
        session.step([1])
        with pytest.raises(ContextOverflow):
            session.step([1])


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], "no tokens"),
        ([1, 2], "chunk sizes"),
        ([16], "outside the vocabulary of 16"),
        ([-1], "outside the vocabulary of 16"),
        ([2**40], "integers below 16"),
        (["a"], "integers below 16"),
    ],
)
def test_bad_tokens(model: Model, tokens: list[Any], message: str) -> None:
    with model.open_session(8) as session:
        with pytest.raises(EmberdError, match=message):
            session.step(tokens)
        assert session.length == 0
        session.step([1])


def test_prefill_checks_every_token_first(model: Model) -> None:
    with model.open_session(64) as session:
        with pytest.raises(EmberdError, match="token id 99"):
            session.prefill([1] * 9 + [99])
        assert session.length == 0


def test_all_logits_of_several_chunks_are_refused(model: Model) -> None:
    with model.open_session(64) as session:
        with pytest.raises(EmberdError, match="step by step"):
            session.prefill([1] * 5, LogitsRole.ALL)
        logits = session.prefill([1] * 4, LogitsRole.ALL)
        assert logits is not None
        assert logits.rows == 4


def test_an_expert_that_does_not_exist_poisons_the_session(model: Model) -> None:
    with model.open_session(8) as session:
        snapshot = session.snapshot()
        with pytest.raises(EmberdError, match="layer 0 chose expert 4 of 4"):
            session.step([BAD_EXPERT])
        for call in (
            lambda: session.step([1]),
            session.snapshot,
            lambda: session.restore(snapshot),
        ):
            with pytest.raises(EmberdError, match=r"failed before .*reset it"):
                call()
        session.reset()
        session.step([1])


def test_a_bad_expert_table_is_an_error(tiny: Any, tmp_path: Path) -> None:
    program = replace(tiny.program, tables=struct.pack("<4i", 5, 6, 3, 1))
    with (
        Model(Artifact.open(tiny.write(tmp_path / "a", program)), 1) as model,
        model.open_session(8) as session,
        pytest.raises(EmberdError, match="expert 1 is in slot 6 of 6"),
    ):
        session.step([1])


KERNEL_ERROR = """
import sys
for name in sys.argv[2:]:
    __import__(name)
from emberd.daemon.artifact import Artifact
from emberd.daemon.core import Model
from emberd.daemon.errors import EmberdError
with Model(Artifact.open(sys.argv[1]), threads=2) as model, model.open_session(8) as session:
    for _ in range(2):
        try:
            session.step([1])
        except EmberdError as error:
            print(error)
"""


@pytest.mark.parametrize("loaded", [[], ["tvm"], ["emberd.daemon.core", "tvm"]])
def test_a_kernel_that_refuses_its_tensors_says_so(
    tiny: Any, tmp_path: Path, loaded: list[str]
) -> None:
    """On a device without TVM, and in a compiler, where kernels may raise their error in TVM."""
    wrong = tiny.with_steps(1, "logits_last", [Step(StepKind.CALL, 5, (0, 1, 2))])
    path = tiny.write(tmp_path / "wrong", wrong)
    command = [sys.executable, "-c", KERNEL_ERROR, str(path), *loaded]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    first, second = result.stdout.splitlines()
    assert first.startswith("kernel head failed: ValueError: Mismatched logits.shape[0]")
    assert second == f"the session failed before ({first}): reset it"


TVM_ERROR = """
import sys
import emberd.daemon.core
import tvm, numpy
head = tvm.runtime.load_module(sys.argv[1])["head"]
shapes = (2, 16), (16, 16), (3, 16)
try:
    head(*(tvm.runtime.tensor(numpy.zeros(shape, "float32")) for shape in shapes))
except ValueError as error:
    print(error)
"""


def test_kernels_of_tvm_keep_their_errors(tiny: Any, tmp_path: Path) -> None:
    """Their library may find the core's function; the error must still reach TVM."""
    (tmp_path / "kernels.so").write_bytes(tiny.kernels)
    command = [sys.executable, "-c", TVM_ERROR, str(tmp_path / "kernels.so")]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "Mismatched logits.shape[0]" in result.stdout


def test_logits_die_with_the_next_step(model: Model) -> None:
    with model.open_session(8) as session:
        logits = session.step([1])
        assert logits is not None
        memory = logits.memory()
        session.step([2])
        for call in (logits.memory, logits.log_sum_exp, lambda: logits.top(1)):
            with pytest.raises(EmberdError, match="another step"):
                call()
        model.close()
        assert len(memory.tolist()) == 1  # the view keeps its memory


def test_logits_operations(model: Model) -> None:
    with model.open_session(8) as session:
        logits = session.step([1, 2, 3, 4], LogitsRole.ALL)
        assert logits is not None
        memory = logits.memory()
        for token in range(16):
            memory[1, token] = float(token % 4)
        ids, values = logits.top(5, row=1)
        assert (ids, values) == ([3, 7, 11, 15, 2], [3.0, 3.0, 3.0, 3.0, 2.0])
        logits.add(2, 1.5, row=1)
        assert logits.top(1, row=-3) == ([2], [3.5])
        assert logits.get(2, row=1) == 3.5
        for temperature in (1.0, 0.3, 5.0):
            total = sum(math.exp(memory[1, token] / temperature) for token in range(16))
            assert logits.log_sum_exp(1, temperature) == pytest.approx(math.log(total), rel=1e-6)
        assert logits.top(100)[0] == logits.top(16, row=3)[0]
        with pytest.raises(EmberdError, match="row 4 of 4"):
            logits.top(1, row=4)
        for call in (lambda: logits.add(16, 1.0), lambda: logits.get(-1)):
            with pytest.raises(EmberdError, match="outside the vocabulary"):
                call()
        for temperature in (0.0, -1.0, math.nan):
            with pytest.raises(EmberdError, match="expected one above 0"):
                logits.log_sum_exp(temperature=temperature)


def test_closed_things_raise(model: Model) -> None:
    first, second = model.open_session(8), model.open_session(8)
    first.close()
    first.close()
    with pytest.raises(EmberdError, match="the session is closed"):
        first.step([1])
    model.close()
    model.close()
    for call in (lambda: second.step([1]), second.reset, lambda: model.open_session(8)):
        with pytest.raises(EmberdError, match="the model is closed"):
            call()
    second.close()


@pytest.mark.parametrize("capacity", [0, -1, 4097])
def test_capacity_is_checked(model: Model, capacity: int) -> None:
    with pytest.raises(EmberdError, match="expected 1 to 4096"):
        model.open_session(capacity)


@pytest.mark.parametrize("threads", [0, -1, 257])
def test_threads_are_checked(tiny_artifact: Artifact, threads: int) -> None:
    with pytest.raises(EmberdError, match="expected 1 to 256"):
        Model(tiny_artifact, threads)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_nothing_leaks(tiny_artifact: Artifact) -> None:
    def cycle() -> None:
        model = Model(tiny_artifact, threads=3)
        session = model.open_session(4096)
        session.prefill(PROMPT)
        session.snapshot()
        model.open_session(16)  # never closed by hand
        model.close()

    def held() -> tuple[int, int, int]:
        gc.collect()
        maps = Path("/proc/self/maps").read_text()
        return (
            len(list(Path("/proc/self/fd").iterdir())),
            len(list(Path("/proc/self/task").iterdir())),
            maps.count("emberd-kernels"),
        )

    for _ in range(5):
        cycle()
    before, memory = held(), resident_bytes()
    for _ in range(100):
        cycle()
    assert held() == before
    assert resident_bytes() - memory < 4 << 20


def test_a_model_that_cannot_open_leaks_nothing(tiny: Any, tmp_path: Path) -> None:
    program = replace(tiny.program, symbols=("no_such_kernel", *tiny.program.symbols[1:]))
    artifact = Artifact.open(tiny.write(tmp_path / "a", program))
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(EmberdError, match="the kernel library has no no_such_kernel"):
        Model(artifact)
    (artifact.path / "experts.bin").unlink()  # after the artifact was opened
    with pytest.raises(EmberdError, match=r"experts\.bin: No such file"):
        Model(artifact)
    gc.collect()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


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
        (Step(StepKind.ACQUIRE_EXPERTS, 0, (0, 3, 2)), "acquire_experts of layer 0"),
        (Step(StepKind.ACQUIRE_EXPERTS, 0, (10, 3)), "acquire_experts of layer 0"),
    ],
)
def test_bad_steps(tiny: Any, tmp_path: Path, step: Step, message: str) -> None:
    artifact = Artifact.open(tiny.write(tmp_path / "a", tiny.with_steps(4, "body", [step])))
    with pytest.raises(EmberdError, match=message):
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
        sequences=tuple(Steps(8, role, ()) for role in ("body", "logits_last", "logits_all")),
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
