"""The artifact: the folder that a device loads, read and written here.

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

import ctypes
import errno
import fcntl
import hashlib
import io
import os
import shutil
import stat
import struct
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from emberd.daemon.errors import EmberdError
from emberd.daemon.machine import ELF_MACHINES, cpu_features, machine
from emberd.daemon.manifest import (
    EXPERTS,
    LARGE,
    MANIFEST,
    PREDICTOR,
    PROGRAM,
    WEIGHTS,
    FileEntry,
    KernelVariant,
    Manifest,
    ModelDescription,
    check_name,
)
from emberd.daemon.program import EncodedProgram, Program

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

__all__ = [
    "EXPERTS",
    "MANIFEST",
    "PROGRAM",
    "WEIGHTS",
    "Artifact",
    "ArtifactWriter",
    "HashingFile",
    "KernelVariant",
    "ModelDescription",
    "check_replaceable",
]

_MANIFEST_LIMIT = 16 << 20
_BLOCK = 4 << 20
_EXCHANGE = 2  # RENAME_EXCHANGE of linux/fs.h
_AT_FDCWD = -100
_PARTIAL = ".partial"
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
        if _hash(_read_manifest(self.path)) != self.digest:
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


class ArtifactWriter:
    """Writes an artifact so that it appears under its name complete or not at all.

        with ArtifactWriter(path, model, target="x86-64") as writer:
            writer.write_program(program)
            writer.add_kernels("avx2", ["avx2", "fma"], library_bytes)   # best first
            with writer.open_file("weights.bin") as file:
                file.write(...)
            with writer.open_file("experts.bin") as file:
                file.write(...)
            writer.write_file("tokenizer.json", data)

    The files go to a hidden folder beside `path`, which takes its name when the block ends without
    an exception, and is removed otherwise; if the process is killed, by the next one that writes
    there. An existing artifact (or empty folder) is replaced;
    anything else at `path` is refused. Equal input gives equal bytes. Raises EmberdError.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        model: ModelDescription,
        *,
        target: str,
        expert_policy: str = "",
    ) -> None:
        self._path = Path(path).absolute()
        self._model = model
        self._target = target
        self._expert_policy = expert_policy
        self._kernels: list[KernelVariant] = []
        self._files: dict[str, FileEntry] = {}
        self._predictor = ""
        self._folder: Path | None = None
        self._lock = -1  # held while there is a process that writes the folder

    def __enter__(self) -> ArtifactWriter:
        check_replaceable(self._path)
        with _writing(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            prefix = f".{self._path.name}."
            with _locked(self._path.parent):
                _remove_abandoned(self._path.parent, prefix)
                self._folder = Path(
                    tempfile.mkdtemp(prefix=prefix, suffix=_PARTIAL, dir=self._path.parent)
                )
                self._lock = _lock(self._folder)
            self._folder.chmod(0o755)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._folder is not None
        try:
            if error is None:
                with _writing(self._path):
                    self._finish(self._folder)
        finally:
            os.close(self._lock)
            shutil.rmtree(self._folder, ignore_errors=True)

    @contextmanager
    def open_file(self, name: str) -> Iterator[HashingFile]:
        """A file of the artifact to write to, in order; hashed on the way, synced at the end."""
        assert self._folder is not None, "use ArtifactWriter in a with statement"
        check_name(name)
        if name in self._files or name == MANIFEST:
            raise ValueError(f"{name} is written twice")
        path = self._folder / name
        with _writing(path):
            raw = path.open("xb")
        try:
            file = HashingFile(raw, path)
            yield file
            file.flush()
            with _writing(path):
                os.fsync(raw.fileno())
        finally:
            with suppress(OSError):  # of what could not be written, which has been said
                raw.close()
        self._files[name] = FileEntry(file.size, file.hexdigest())

    def write_file(self, name: str, data: bytes) -> None:
        """Writes a whole file."""
        with self.open_file(name) as file:
            file.write(data)

    def write_program(self, program: Program) -> None:
        """Writes program.msgpack."""
        self.write_file(PROGRAM, program.to_bytes())

    def add_kernels(self, isa: str, cpu_features: Sequence[str], library: bytes) -> None:
        """Adds the kernel library of an ISA level; add the best first, the device takes the first
        whose `cpu_features` it has."""
        variant = KernelVariant(isa, f"kernels-{isa}.so", tuple(cpu_features))
        self.write_file(variant.file, library)
        self._kernels.append(variant)

    def add_predictor(self, write: Callable[[Path], None]) -> None:
        """Adds the artifact that `write` makes at the path that it is given."""
        assert self._folder is not None, "use ArtifactWriter in a with statement"
        folder = self._folder / PREDICTOR
        with _writing(folder), tempfile.TemporaryDirectory(dir=self._folder) as own:
            write(Path(own) / PREDICTOR)  # writers lock the folder that they write to, and ours is
            (Path(own) / PREDICTOR).rename(folder)
        self._predictor = _hash(_read_manifest(folder))

    def set_identity(self, identity: str) -> None:
        """Says what the weights are (`ModelDescription.identity`), once they are written."""
        self._model = replace(self._model, identity=identity)

    def _finish(self, folder: Path) -> None:
        missing = [name for name in (PROGRAM, *LARGE) if name not in self._files]
        if missing or not self._kernels:
            raise ValueError(f"incomplete artifact: no {', '.join(missing) or 'kernels'}")
        manifest = Manifest(
            self._model,
            self._target,
            self._expert_policy,
            tuple(self._kernels),
            self._files,
            self._predictor,
        )
        with (folder / MANIFEST).open("xb") as file:
            file.write(manifest.to_bytes())
            file.flush()
            os.fsync(file.fileno())
        _sync_folder(folder)
        check_replaceable(self._path)
        _put_in_place(folder, self._path)
        _sync_folder(self._path.parent)


class HashingFile:
    """A binary file open for writing that knows the size and BLAKE2b-256 of what went into it.

    It is written in large aligned blocks: Linux then keeps it in huge pages, where it can.
    """

    def __init__(self, raw: io.BufferedWriter, path: Path) -> None:
        self._raw = raw
        self._path = path
        self._digest = hashlib.blake2b(digest_size=32)
        self._pending = bytearray()
        self.size = 0

    def write(self, data: ReadableBuffer) -> int:
        """Appends `data` (bytes or any contiguous buffer)."""
        view = memoryview(data).cast("B")
        self._digest.update(view)
        self.size += len(view)
        for start in range(-len(self._pending), len(view), _BLOCK):
            self._pending += view[max(start, 0) : start + _BLOCK]
            if len(self._pending) == _BLOCK:
                self.flush()
        return len(view)

    def flush(self) -> None:
        """Hands to the system what it has not got yet."""
        with _writing(self._path):
            self._raw.write(self._pending)
            self._raw.flush()
        self._pending.clear()

    def hexdigest(self) -> str:
        """The hash of everything written so far."""
        return self._digest.hexdigest()


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


def check_replaceable(path: Path) -> None:
    """Refuses to overwrite what is neither an artifact nor an empty folder. Raises EmberdError."""
    if not os.path.lexists(path):
        return
    if path.is_dir() and not path.is_symlink():
        with suppress(OSError, EmberdError):
            if not any(path.iterdir()):
                return
            Manifest.from_bytes((path / MANIFEST).read_bytes())
            return
    raise EmberdError(f"{path} exists and is not an artifact: choose another name or remove it")


def _remove_abandoned(parent: Path, prefix: str) -> None:
    """Removes what killed processes left half-written: folders that nobody has locked."""
    for folder in parent.iterdir():
        if folder.name.startswith(prefix) and folder.suffix == _PARTIAL and folder.is_dir():
            with suppress(OSError):
                os.close(_lock(folder, fcntl.LOCK_NB))
                shutil.rmtree(folder)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    descriptor = _lock(folder)
    try:
        yield
    finally:
        os.close(descriptor)


def _lock(folder: Path, flags: int = 0) -> int:
    """A descriptor of `folder` that keeps it locked while it is open."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | flags)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _put_in_place(folder: Path, path: Path) -> None:
    """Gives `folder` the name `path`; what was there ends up under the name `folder`."""
    if not path.exists():
        folder.rename(path)
    elif not _exchange(folder, path):
        old = folder.with_suffix(".replaced")
        path.rename(old)
        folder.rename(path)
        old.rename(folder)


def _exchange(a: Path, b: Path) -> bool:
    """Swaps two names in one atomic step; False where libc or the file system cannot."""
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
    if renameat2 is None:
        return False
    arguments = (_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), ctypes.c_uint(_EXCHANGE))
    return bool(renameat2(*arguments) == 0)


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turns an OSError of ours into an EmberdError that names what was being written."""
    try:
        yield
    except OSError as error:
        raise EmberdError(f"cannot write {path}: {error.strerror}") from error
