"""An artifact without a model: small files of every kind."""

from __future__ import annotations

from pathlib import Path

from emberd.daemon.artifact_writer import ArtifactWriter
from emberd.daemon.machine import ELF_MACHINES, machine
from emberd.daemon.manifest import ModelDescription
from emberd.daemon.program import ROLES, SECTION_SIZES, Program, Sequence

DESCRIPTION = ModelDescription(
    name="small",
    architecture="test",
    vocab_size=100,
    hidden_size=8,
    layers=2,
    max_context=64,
    stop_tokens=(3, 99),
    recipe="q4",
    details={"parameters": 12345},
)
PROGRAM = Program(
    symbols=("kernel",),
    chunk_sizes=(1, 8),
    buffers=(),
    section_bytes=dict.fromkeys(SECTION_SIZES, 4096),
    tables=b"",
    sequences=tuple(Sequence(tokens, role, ()) for tokens in (1, 8) for role in ROLES),
)


def elf(name: str = machine()) -> bytes:
    """The header of a library for the machine `name`."""
    code = next(code for code, known in ELF_MACHINES.items() if known == name)
    return b"\x7fELF\x02\x01\x01" + bytes(11) + code.to_bytes(2, "little") + bytes(44)


def write(path: Path, kernels: dict[str, list[str]] | None = None, library: bytes = b"") -> Path:
    with ArtifactWriter(path, DESCRIPTION, target="some-box", expert_policy="lru") as writer:
        writer.write_program(PROGRAM)
        for isa, features in ({"plain": []} if kernels is None else kernels).items():
            writer.add_kernels(isa, features, library or elf())
        for name in ("weights.bin", "experts.bin"):
            with writer.open_file(name) as file:
                file.write(bytes(1000))
                file.write(memoryview(b"abcd"))
        writer.write_file("tokenizer.json", b'{"model": 1}')
    return path
