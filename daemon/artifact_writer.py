"""Writes artifacts (daemon/artifact.py reads them): whole or not at all."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import io
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from emberd.daemon.artifact import digest_of
from emberd.daemon.errors import EmberdError
from emberd.daemon.manifest import (
    LARGE,
    MANIFEST,
    PREDICTOR,
    PROGRAM,
    FileEntry,
    KernelVariant,
    Manifest,
    ModelDescription,
    check_name,
)
from emberd.daemon.program import Program

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_BLOCK = 4 << 20
_EXCHANGE = 2  # RENAME_EXCHANGE of linux/fs.h
_AT_FDCWD = -100
_PARTIAL = ".partial"


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
        self._predictor = digest_of(folder)

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
