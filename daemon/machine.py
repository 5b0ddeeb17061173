"""Facts about the machine this runs on: architecture, CPU features, cores that may be used."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable
from functools import cache
from pathlib import Path

# e_machine of an ELF header -> what platform.machine() calls it.
ELF_MACHINES = {62: "x86_64", 183: "aarch64", 243: "riscv64"}

_CPUINFO = Path("/proc/cpuinfo")
_TOPOLOGY = Path("/sys/devices/system/cpu")
_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")


def machine() -> str:
    """The architecture of this machine, as in ELF_MACHINES."""
    return platform.machine()


@cache
def cpu_features() -> frozenset[str]:
    """Feature names of this CPU, as /proc/cpuinfo lists them (flags, Features or isa)."""
    try:
        text = _CPUINFO.read_text()
    except OSError:
        return frozenset()
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(value.split())
        if key.strip() == "isa":  # RISC-V: rv64imafdcv_zicsr_...: single letters, then names
            base, *extensions = value.strip().split("_")
            return frozenset(base.removeprefix("rv64")) | frozenset(extensions)
    return frozenset()


def physical_cpus() -> tuple[int, ...]:
    """One CPU number for each physical core that this process may run on, ascending.

    Respects the affinity mask and, where a cgroup v2 quota is set, its size in whole cores.
    """
    cores: dict[tuple[str, str], int] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        topology = _TOPOLOGY / f"cpu{cpu}" / "topology"
        try:
            core = (
                (topology / "physical_package_id").read_text(),
                (topology / "core_id").read_text(),
            )
        except OSError:
            core = ("unknown", str(cpu))
        cores.setdefault(core, cpu)
    cpus = tuple(sorted(cores.values()))
    quota = _cgroup_quota()
    return cpus if quota is None else cpus[: max(1, int(quota))]


def _cgroup_quota() -> float | None:
    """The smallest cpu.max of this process's cgroup and its ancestors, in cores."""
    try:
        own = _OWN_CGROUP.read_text()
    except OSError:
        return None
    relative = next((line[3:] for line in own.splitlines() if line.startswith("0::")), None)
    if relative is None:
        return None
    folder = _CGROUPS / relative.strip().lstrip("/")
    quotas = []
    for group in (folder, *folder.parents):
        if not group.is_relative_to(_CGROUPS):
            break
        try:
            quota, period = (group / "cpu.max").read_text().split()
            if quota != "max":
                quotas.append(int(quota) / int(period))
        except (OSError, ValueError, ZeroDivisionError):
            continue
    return min(quotas, default=None)


def return_free_memory() -> None:
    """Gives memory that was freed back to the system, where the C library keeps it (glibc)."""
    if trim := _malloc_trim():
        trim(0)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim.argtypes = (ctypes.c_size_t,)
    return trim
