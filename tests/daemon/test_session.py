"""Sessions of the core: snapshots, resets, limits, and giving everything back."""

from __future__ import annotations

import gc
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from emberd.daemon.artifact import Artifact
from emberd.daemon.core import Model
from emberd.daemon.errors import EmberdError
from emberd.daemon.session import Session
from tiny_model import PROMPT, last_row


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


def test_snapshots_give_their_memory_back(tiny: Any, tmp_path: Path) -> None:
    """Also those of a thread: of its heap, glibc would keep what lies at the end."""
    size = 8 << 20
    big = replace(tiny.program, section_bytes={**tiny.program.section_bytes, "state": size})
    artifact = Artifact.open(tiny.write(tmp_path / "big", big))

    def take_some(session: Session) -> None:
        for _ in range(6):
            session.snapshot()
        kept = [session.snapshot() for _ in range(6)]
        held.append(resident_bytes() - before)
        del kept

    with Model(artifact, threads=1) as model, model.open_session(64) as session:
        session.prefill(PROMPT)
        held: list[int] = []
        before = resident_bytes()
        taking = threading.Thread(target=take_some, args=(session,))
        taking.start()
        taking.join()
        assert held[0] > 5 * size
        assert resident_bytes() - before < 2 * size


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
