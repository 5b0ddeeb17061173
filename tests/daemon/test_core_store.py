"""Expert budgets: results are the same bits whatever the budget, and damage is one request's."""

from __future__ import annotations

import gc
import os
import random
import resource
import shutil
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from emberd.daemon.artifact import Artifact
from emberd.daemon.core import PINNED, Model
from emberd.daemon.errors import EmberdError
from emberd.daemon.metrics import open_files, resident_bytes
from emberd.daemon.session import LogitsRole
from emberd.daemon.trace import RoutingTrace
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_model import last_row

PROMPT_TOKENS = [(7 * i * i + 3 * i) % 500 for i in range(150)]


def conversation(model: Model) -> list[bytes]:
    """Logits of a prompt, of decoded tokens and of a batch."""
    with model.open_session(256) as first, model.open_session(256) as second:
        logits = [first.prefill(PROMPT_TOKENS), second.prefill(PROMPT_TOKENS[:9], LogitsRole.ALL)]
        rows = [bytes(view.memory()) for view in logits[1:] if view is not None]
        for token in PROMPT_TOKENS[:12]:
            view = first.step([token])
            assert view is not None
            rows.append(bytes(view.memory()))
        for token in PROMPT_TOKENS[:4]:
            rows.append(bytes(model.step_batch([first, second], [token, token + 1]).memory()))
        return rows


@pytest.fixture(scope="module")
def demo(demo_artifact: Path) -> Artifact:
    return Artifact.open(demo_artifact)


@pytest.fixture(scope="module")
def expected(demo: Artifact) -> list[bytes]:
    """The conversation with all experts mapped."""
    with Model(demo, 2) as model:
        return conversation(model)


@pytest.mark.parametrize("readers", [1, 4])
@pytest.mark.parametrize("slots", [2, 3, 9, 40, 63, 64])
def test_results_do_not_depend_on_the_budget(
    demo: Artifact, expected: list[bytes], slots: int, readers: int
) -> None:
    with Model(demo, 2) as model:
        expert_bytes = model.experts.expert_bytes
    with Model(demo, 2, slots * expert_bytes, readers) as model:
        assert conversation(model) == expected
        counters = model.expert_counters()
        assert all((c.misses > 0) == (slots < 64) for c in counters)
        read = sum(c.bytes for c in counters)
        assert read == expert_bytes * sum(c.misses for c in counters)


@pytest.mark.parametrize("readers", [1, 4])
@pytest.mark.parametrize("slots", [2, 3, 9, 40, 63, 64])
def test_results_do_not_depend_on_what_is_expected(
    demo: Artifact, expected: list[bytes], slots: int, readers: int
) -> None:
    with Model(demo, 2, reader_threads=readers) as model:
        model.set_expert_budget(slots * model.experts.expert_bytes)
        model.expect_experts(True)
        assert conversation(model) == expected
        counters = model.expert_counters()
        assert counters[0].expected == 0
        assert all(c.expected >= c.expected_used for c in counters)
        assert slots not in (2, 64) or not any(c.expected for c in counters)


def test_a_budget_changed_while_running_changes_no_bit(
    demo: Artifact, expected: list[bytes]
) -> None:
    """Case R3: 90 % of the budget goes, and comes back."""
    with Model(demo, 2) as model:
        bank = model.experts.layers * model.experts.experts * model.experts.expert_bytes
        for budget in (bank - 1, bank // 10, None, bank // 2, 10 * bank, bank // 10):
            model.set_expert_budget(budget)
            assert model.expert_budget == budget
            assert conversation(model) == expected


def test_a_chunk_reads_each_expert_once(demo: Artifact) -> None:
    with Model(demo, 2) as model:
        layout = model.experts
        model.set_expert_budget(3 * layout.expert_bytes)
        with model.open_session(256) as session, RoutingTrace(model) as trace:
            session.step(PROMPT_TOKENS, LogitsRole.NONE)
        ids = trace.take().ids.tolist()
        for layer, counters in enumerate(model.expert_counters()):
            different = {expert for token in ids for expert in token[layer]}
            assert (counters.hits, counters.misses) == (0, len(different))
            assert counters.bytes == len(different) * layout.expert_bytes


@pytest.mark.parametrize("short", [-(2**70), -1, 0, 1])
def test_a_budget_too_small_for_a_step_is_refused(demo: Artifact, short: int) -> None:
    with Model(demo, 1) as model, model.open_session(8) as session:
        least = 2 * model.experts.expert_bytes
        budget = least - 1 if short == 1 else short
        with pytest.raises(EmberdError, match=f"a step needs 2 experts at once, {least} bytes"):
            model.set_expert_budget(budget)
        assert model.expert_budget is None
        session.step([1])
    with pytest.raises(EmberdError, match=r"demo.*: an expert budget of 5 bytes"):
        Model(demo, 1, 5)
    with pytest.raises(EmberdError, match="0 reader threads"):
        Model(demo, 1, least, 0)


def locked_bytes() -> int:
    """Memory of this process that cannot be evicted."""
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if "VmLck" in line)) * 1024


def test_the_other_weights_are_kept_where_that_is_allowed(demo: Artifact) -> None:
    before, size = locked_bytes(), demo.sizes["weights.bin"]
    soft, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    allowed = os.geteuid() == 0 or soft == resource.RLIM_INFINITY or soft > before + 2 * size
    with Model(demo, 1, 40 * 24576):
        assert (locked_bytes() - before >= size) == allowed
    assert locked_bytes() == before


class Bookkeeping:
    """What the store should hold, one plain step after the other; experts are (layer, id)."""

    def __init__(self, experts: int) -> None:
        self.slots: list[tuple[int, int] | None] = [None] * experts
        self.used: dict[tuple[int, int], int] = {}
        self.limit = self.clock = 0
        self.priorities: dict[tuple[int, int], int] = {}
        self.hits = self.misses = 0

    def resize(self, limit: int) -> None:
        self.limit = limit
        while sum(expert is not None for expert in self.slots) > limit:
            self.slots[self._victim(set())] = None

    def acquire(self, layer: int, ids: Sequence[int]) -> None:
        self.clock += 1
        wanted = {(layer, expert) for expert in ids}
        missing = sorted(wanted - set(self.slots))
        self.hits += len(wanted) - len(missing)
        self.misses += len(missing)
        self.used |= dict.fromkeys(wanted, self.clock)
        for expert in missing:
            full = sum(other is not None for other in self.slots) == self.limit
            self.slots[self._victim(wanted) if full else self.slots.index(None)] = expert

    def _victim(self, needed: set[tuple[int, int]]) -> int:
        candidates = [
            (self.priorities.get(expert, 0), self.used[expert], index)
            for index, expert in enumerate(self.slots)
            if expert is not None and expert not in needed
        ]
        return min(candidates)[2]


@settings(deadline=None, max_examples=25, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_replacement_is_as_a_plain_model_says(demo: Artifact, data: st.DataObject) -> None:
    plain = Bookkeeping(64)
    with Model(demo, 1, 63 * 24576) as model, model.open_session(256) as session:
        assert model.experts.expert_bytes == 24576
        plain.resize(63)
        for _ in range(data.draw(st.integers(1, 5))):
            slots = data.draw(st.integers(2, 63))
            model.set_expert_budget(slots * 24576)
            plain.resize(slots)
            values = data.draw(st.sampled_from([0, 1, 2]))
            priorities = [(i * 7 % 3) * values if i % 11 else PINNED for i in range(64)]
            model.set_expert_priorities(priorities)
            plain.priorities = {divmod(i, 16): value for i, value in enumerate(priorities)}
            with RoutingTrace(model) as trace:
                for token in data.draw(st.lists(st.integers(0, 499), min_size=1, max_size=20)):
                    session.step([token], LogitsRole.NONE)
            for token_ids in trace.take().ids.tolist():
                for layer, ids in enumerate(token_ids):
                    plain.acquire(layer, ids)
            counters = model.expert_counters()
            assert sum(c.hits for c in counters) == plain.hits
            assert sum(c.misses for c in counters) == plain.misses


def wait_for_reads(model: Model, count: int) -> None:
    """Until so many experts were read in all; at most for some seconds."""
    for _ in range(1000):
        if sum(c.bytes for c in model.expert_counters()) == count * model.experts.expert_bytes:
            return
        time.sleep(0.005)
    pytest.fail(f"{count} experts were not read")


def test_warm_experts_are_there_when_they_are_needed(demo: Artifact) -> None:
    with Model(demo, 2) as model, model.open_session(8) as session:
        with RoutingTrace(model) as trace:
            session.step([11])
        (token,) = trace.take().ids.tolist()
        needed = [(layer, expert) for layer, ids in enumerate(token) for expert in ids]
        others = [(layer, e) for layer in range(4) for e in range(16) if (layer, e) not in needed]
        session.reset()
        model.warm_experts(needed)  # all are mapped
        model.set_expert_budget(10 * model.experts.expert_bytes)
        model.warm_experts(needed + others)  # 10 find a place
        wait_for_reads(model, 10)
        session.step([11])
        counters = model.expert_counters()
        assert [(c.hits, c.misses, c.stall_nanoseconds) for c in counters] == [(2, 0, 0)] * 4
        model.set_expert_priorities([PINNED if divmod(i, 16) in needed else 0 for i in range(64)])
        model.warm_experts(others[2:])  # two more: the needed ones are pinned
        wait_for_reads(model, 12)
        session.reset()
        session.step([11])
        assert sum(c.misses for c in model.expert_counters()) == 0
        for wrong in ((4, 0), (0, 16), (-1, 0)):
            with pytest.raises(EmberdError, match="does not exist"):
                model.warm_experts([wrong])
        for priorities in ([0] * 63, [2**31] * 64):
            with pytest.raises(EmberdError, match="priorities"):
                model.set_expert_priorities(priorities)
    for call in (
        lambda: model.set_expert_budget(None),
        lambda: model.warm_experts([]),
        lambda: model.set_expert_priorities([0] * 64),
    ):
        with pytest.raises(EmberdError, match="the model is closed"):
            call()


def test_what_finds_no_place_keeps_none_of_a_higher_priority_from_one(demo: Artifact) -> None:
    with Model(demo, 2) as model:
        model.set_expert_budget(4 * model.experts.expert_bytes)
        priorities = [0] * 64
        priorities[:4] = 2, 2, 4, 4
        model.set_expert_priorities(priorities)
        model.warm_experts([(0, expert) for expert in range(4)])
        wait_for_reads(model, 4)
        priorities[4:8] = 1, 3, 0, 3
        model.set_expert_priorities(priorities)
        model.warm_experts([(0, expert) for expert in range(4, 8)])
        wait_for_reads(model, 6)
        there = [i for i, resident in enumerate(model.resident_experts()) if resident]
        assert there == [2, 3, 5, 7]


def test_warming_and_pinning_during_steps_change_no_bit(
    demo: Artifact, expected: list[bytes]
) -> None:
    draw, over = random.Random(7), threading.Event()

    def prefer() -> None:
        while not over.wait(draw.random() / 1000):
            model.warm_experts(draw.sample(everything, 20))
            model.set_expert_priorities(draw.choices((0, 1, PINNED), k=len(everything)))

    with Model(demo, 2) as model:
        everything = [(layer, expert) for layer in range(4) for expert in range(16)]
        thread = threading.Thread(target=prefer)
        thread.start()
        try:
            for slots in (2, 3, 9, 40, 63, 5):
                model.set_expert_budget(slots * model.experts.expert_bytes)
                assert conversation(model) == expected
        finally:
            over.set()
            thread.join()


@pytest.fixture
def copied(demo_artifact: Path, tmp_path: Path) -> Path:
    """A demo artifact whose files may be damaged."""
    return Path(shutil.copytree(demo_artifact, tmp_path / "demo"))


def test_a_truncated_bank_fails_the_request_and_no_more(
    copied: Path, expected: list[bytes]
) -> None:
    """Case R2: the file is cut short while sessions run, and put right again."""
    bank = copied / "experts.bin"
    data = bank.read_bytes()
    with Model(Artifact.open(copied), 2, 40 * 24576) as model:
        first, second = model.open_session(64), model.open_session(64)
        before = last_row(second.step([5]))
        os.truncate(bank, 0)
        with pytest.raises(EmberdError, match=r"of layer 0 cannot be read: the file was truncated"):
            first.step(PROMPT_TOKENS[:60])
        second.reset()
        assert last_row(second.step([5])) == before  # its experts are in memory
        with pytest.raises(EmberdError, match="failed before"):
            first.step([1])
        with bank.open("r+b") as file:
            file.write(data)
        assert conversation(model) == expected


@pytest.mark.parametrize("name", ["experts.bin", "weights.bin"])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_truncated_map_fails_the_request_and_not_the_process(
    copied: Path, expected: list[bytes], name: str, threads: int
) -> None:
    data = (copied / name).read_bytes()
    with Model(Artifact.open(copied), threads) as model, model.open_session(256) as session:
        assert conversation(model) == expected
        os.truncate(copied / name, 3 * 4096)
        for _ in range(2):
            with pytest.raises(EmberdError, match=f"{name} cannot be read: the file was truncated"):
                session.step(PROMPT_TOKENS)
            session.reset()
        with (copied / name).open("r+b") as file:
            file.write(data)
        assert conversation(model) == expected


def test_a_bank_that_vanishes_is_still_read(copied: Path, expected: list[bytes]) -> None:
    with Model(Artifact.open(copied), 2, 5 * 24576) as model:
        (copied / "experts.bin").unlink()
        assert conversation(model) == expected


def test_a_thousand_changes_leave_nothing_behind(demo: Artifact) -> None:
    def change(rounds: int) -> None:
        for i in range(rounds):
            with Model(demo, 1, 40 * 24576) as model, model.open_session(64) as session:
                for slots in (2 + i % 60, 64, 63, 3):
                    model.set_expert_budget(slots * 24576)
                    session.step([i], LogitsRole.NONE)
        gc.collect()

    change(30)
    files, memory = open_files(), resident_bytes()
    change(200)
    assert open_files() == files
    assert resident_bytes() < memory + (4 << 20)
