"""Facts about the machine, from kernel files of machines of several kinds."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from emberd.daemon import machine


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("processor : 0\nflags\t\t: fpu avx2 avx512_vnni\n", {"fpu", "avx2", "avx512_vnni"}),
        ("processor : 0\nFeatures\t: fp asimd asimddp i8mm\n", {"fp", "asimd", "asimddp", "i8mm"}),
        ("hart : 0\nisa\t\t: rv64imv_zicsr_zvl128b\n", {"i", "m", "v", "zicsr", "zvl128b"}),
        ("nothing here\n", set()),
    ],
)
def test_cpu_features(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, expected: set[str]
) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    monkeypatch.setattr(machine, "_CPUINFO", tmp_path / "cpuinfo")
    machine.cpu_features.cache_clear()
    try:
        assert machine.cpu_features() == expected
    finally:
        machine.cpu_features.cache_clear()


@pytest.fixture
def four_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four CPUs, two per core, without a quota."""
    for cpu in range(4):
        topology = tmp_path / f"cpu/cpu{cpu}/topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text("0\n")
        (topology / "core_id").write_text(f"{cpu // 2}\n")
    (tmp_path / "cgroup/outer/inner").mkdir(parents=True)
    (tmp_path / "own").write_text("0::/outer/inner\n")
    monkeypatch.setattr(machine, "_TOPOLOGY", tmp_path / "cpu")
    monkeypatch.setattr(machine, "_CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(machine, "_OWN_CGROUP", tmp_path / "own")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2, 3})
    return tmp_path


def test_one_cpu_per_core(four_cpus: Path) -> None:
    assert machine.physical_cpus() == (0, 2)


def test_only_cpus_of_ours(four_cpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {1, 3, 9})
    assert machine.physical_cpus() == (1, 3, 9)  # the topology does not know 9


@pytest.mark.parametrize(
    ("outer", "inner", "expected"),
    [
        ("max 100000", "max 100000", (0, 2)),
        ("150000 100000", "max 100000", (0,)),
        ("max 100000", "50000 100000", (0,)),
        ("400000 100000", "200000 100000", (0, 2)),
        ("nonsense", "100000 0", (0, 2)),
    ],
)
def test_quota(four_cpus: Path, outer: str, inner: str, expected: tuple[int, ...]) -> None:
    (four_cpus / "cgroup/outer/cpu.max").write_text(outer)
    (four_cpus / "cgroup/outer/inner/cpu.max").write_text(inner)
    assert machine.physical_cpus() == expected


def test_without_cgroups(four_cpus: Path) -> None:
    (four_cpus / "own").unlink()
    assert machine.physical_cpus() == (0, 2)
