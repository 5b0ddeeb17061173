"""The instruction sets that kernels are built for, and which of them this machine can run."""

from pathlib import Path

from emberd.compile.isa.avx2 import AVX2
from emberd.compile.isa.avx512vnni import AVX512VNNI
from emberd.compile.isa.definition import Isa
from emberd.compile.isa.generic import GENERIC

__all__ = ["ISAS", "Isa", "host_isas"]

ISAS: dict[str, Isa] = {isa.name: isa for isa in (AVX512VNNI, AVX2, GENERIC)}  # best first


def host_isas(cpuinfo: Path = Path("/proc/cpuinfo")) -> list[Isa]:
    """The ISAS that this machine can run, best first."""
    flags: set[str] = set()
    for line in cpuinfo.read_text().splitlines():
        if line.startswith("flags"):
            flags.update(line.partition(":")[2].split())
            break
    return [isa for isa in ISAS.values() if flags.issuperset(isa.cpu_features)]
