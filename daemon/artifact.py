"""The artifact: the folder that a device loads, read here (daemon/artifact_writer.py writes it).

    manifest.json          what it is, and size and hash of every other file (daemon/manifest.py)
    program.msgpack        the compiled step (daemon/program.py)
    kernels-<isa>.so       compiled kernels, one file per ISA level, listed best first
    weights.bin            everything but experts, page-aligned, mapped
    experts.bin            the experts, one 4096-aligned blob each, mapped
    vocabulary.msgpack     the tokenizer, compiled (daemon/vocabulary.py)
    chat_template.jinja ...  the text files of the checkpoint, unchanged
    expert_activation_map.bin   if it was built with one (daemon/activation_map.py)
    predictor/             likewise: an artifact, of a network that says which experts come next

Small files are read whole, checked against the manifest, and it is those very bytes that are used.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import struct
from collections.abc import Sequence
from pathlib import Path

from emberd.daemon.errors import EmberdError
from emberd.daemon.machine import ELF_MACHINES, cpu_features, machine
from emberd.daemon.manifest import (
    EXPERTS,
    LARGE,
    MANIFEST,
    PREDICTOR,
    PROGRAM,
    WEIGHTS,
    KernelVariant,
    Manifest,
)
from emberd.daemon.program import EncodedProgram

__all__ = ["EXPERTS", "WEIGHTS", "Artifact", "digest_of"]

_MANIFEST_LIMIT = 16 << 20
_BLOCK = 4 << 20
_SOURCES = ("config.json", "model.yaml")  # of a checkpoint, of a converted model


class Artifact:
    """An artifact opened for use: checked, small files in memory, large files by descriptor.

    Attributes: `path`; `model`; `target` (name); `expert_policy` (name, or empty); `digest` (hex
    BLAKE2b-256 of the manifest, which covers every byte of the artifact); `has_predictor`;
    `kernels` (the variant chosen for this CPU); `kernel_library` (its bytes); `program`; `sizes`
    (bytes of every file).
    """

    def __init__(self, path: Path, manifest: bytes) -> None:
        self.path = path
        self.digest = _hash(manifest)
        parsed = Manifest.from_bytes(manifest)
        self.model = parsed.model
        self.target = parsed.target
        self.expert_policy = parsed.expert_policy
        self._files = parsed.files
        self._predictor = parsed.predictor
        self.has_predictor = bool(parsed.predictor)
        self.sizes = {name: entry.bytes for name, entry in self._files.items()}
        for name in LARGE:
            os.close(self.open_file(name))
        self._small = {name: self._read(name) for name in self._files if name not in LARGE}
        self.kernels = self._choose(parsed.kernels)
        self.kernel_library = self._small[self.kernels.file]
        self.program = EncodedProgram.from_bytes(self._small[PROGRAM])

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Artifact:
        """Opens the artifact folder at `path` and checks all of it but the bytes of weights.bin
        and experts.bin (see `verify_weights`).

        Raises EmberdError for anything that is missing, damaged, of another version, or compiled
        for another machine.
        """
        folder = Path(path)
        manifest = _read_manifest(folder)
        try:
            return cls(folder, manifest)
        except EmberdError as error:
            raise EmberdError(f"{folder}: {error}") from None

    def check_in_place(self) -> None:
        """Raises EmberdError where the folder holds another artifact than when it was opened."""
        if digest_of(self.path) != self.digest:
            raise EmberdError(f"{self.path} was replaced by another artifact: start emberd again")

    def has(self, name: str) -> bool:
        """Whether the artifact has a file of this name."""
        return name in self._files

    def read(self, name: str) -> bytes:
        """The checked bytes of a small file (vocabulary.msgpack, chat_template.jinja, ...)."""
        if name not in self._small:
            raise EmberdError(f"{self.path} has no {name}")
        return self._small[name]

    def predictor(self) -> Artifact:
        """The network that says which experts come next, opened. Raises EmberdError where there is
        none, or another one than was built."""
        if not self.has_predictor:
            raise EmberdError(f"{self.path} has no predictor")
        found = Artifact.open(self.path / PREDICTOR)
        if found.digest != self._predictor:
            raise EmberdError(f"{found.path} is damaged: copy the artifact again")
        return found

    def open_file(self, name: str) -> int:
        """A read-only descriptor of a file, of the size that the manifest states."""
        expected = self._files[name].bytes
        try:
            descriptor = _open_regular(self.path / name)
        except OSError as error:
            raise EmberdError(f"{name}: {error.strerror}") from None
        actual = os.fstat(descriptor).st_size
        if actual != expected:
            os.close(descriptor)
            raise EmberdError(f"{name} has {actual} bytes, expected {expected}: copy it again")
        return descriptor

    def verify_weights(self) -> None:
        """Reads weights.bin and experts.bin through and compares their hashes with the manifest;
        those of the predictor too.

        They are read from the disk, not from pages that are cached of writing them: so what is on
        it is checked, and a copy that was cached in small pages is cached in large ones after.
        """
        for name in LARGE:
            digest = hashlib.blake2b(digest_size=32)
            try:
                with open(self.open_file(name), "rb", buffering=0) as file:  # noqa: PTH123
                    os.fsync(file.fileno())
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                    while block := file.read(_BLOCK):
                        digest.update(block)
            except OSError as error:
                raise EmberdError(f"{self.path / name}: {error.strerror}") from None
            if digest.hexdigest() != self._files[name].blake2b:
                raise EmberdError(f"{self.path / name} is damaged: copy the artifact again")
        if self.has_predictor:
            self.predictor().verify_weights()

    def _read(self, name: str) -> bytes:
        entry = self._files[name]
        try:
            with open(self.open_file(name), "rb") as file:  # noqa: PTH123
                data = file.read(entry.bytes)
        except OSError as error:
            raise EmberdError(f"{name}: {error.strerror}") from None
        if _hash(data) != entry.blake2b:
            raise EmberdError(f"{name} is damaged (its hash differs): copy the artifact again")
        return data

    def _choose(self, variants: Sequence[KernelVariant]) -> KernelVariant:
        """The first variant that this CPU can run."""
        here = machine()
        for variant in variants:
            built_for = _elf_machine(self._small[variant.file], variant.file)
            if built_for != here:
                raise EmberdError(
                    f"built for target {self.target} ({built_for}), this machine is {here}: "
                    "build it for this target"
                )
        features = cpu_features()
        for variant in variants:
            if features.issuperset(variant.cpu_features):
                return variant
        wanted = "; ".join(
            f"{v.isa} needs {', '.join(sorted(set(v.cpu_features) - features))}" for v in variants
        )
        raise EmberdError(
            f"no kernels for this CPU ({here}): it lacks what each variant needs ({wanted}): "
            "build with an ISA level that it has"
        )


def digest_of(folder: Path) -> str:
    """`Artifact.digest` of what is in a folder, which is not checked. Raises EmberdError."""
    return _hash(_read_manifest(folder))


def _read_manifest(folder: Path) -> bytes:
    try:
        with open(_open_regular(folder / MANIFEST), "rb") as file:
            return file.read(_MANIFEST_LIMIT)
    except OSError as error:
        raise EmberdError(_not_an_artifact(folder, error)) from None


def _not_an_artifact(folder: Path, error: OSError) -> str:
    """What to say of a folder whose manifest cannot be opened."""
    if not folder.exists():
        return f"{folder} does not exist"
    if any((folder / name).exists() for name in _SOURCES):
        return f"{folder} is not an artifact but a model to compile: run emberc build first"
    return f"{folder} is not an artifact: {MANIFEST}: {error.strerror}"


def _open_regular(path: Path) -> int:
    """A read-only descriptor; O_NONBLOCK, as opening a pipe would wait for its writer."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "not a regular file", path)


def _elf_machine(library: bytes, name: str) -> str:
    if len(library) < 64 or library[:6] != b"\x7fELF\x02\x01":
        raise EmberdError(f"{name} is not a 64-bit little-endian ELF library")
    (code,) = struct.unpack_from("<H", library, 18)
    return ELF_MACHINES.get(code, f"ELF machine {code}")


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=32).hexdigest()
