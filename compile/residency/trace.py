"""Recorded traces: which experts every token of a series of commands chose.

A trace file is a stream of msgpack maps, so that it can be written and read a command at a time:
first {format, version, model, layers, experts, top_k, expert_bytes, next_layer}, with `model` the
identity of the artifact's weights, then one {class, prompt, ids, weights, next_layer} a command:
ids uint16 [tokens, layers, top_k] and weights float16 of the same shape, little-endian, heaviest
first; the first `prompt` tokens were read together, the others generated one by one. For these,
next_layer uint16 [tokens - prompt, layers - 1, next_layer] are the experts that the router of each
next layer expected from a layer's hidden state, best first; empty where that was not noted. Last
comes {commands}, how many there were: a file without it is of a run that was stopped.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgpack
import numpy as np
from emberd.daemon.errors import EmberdError
from emberd.daemon.record import INT32_MAX, INT64_MAX, Record
from numpy.typing import NDArray

FORMAT = "emberd-routing-trace"
VERSION = 3
_LARGEST_COMMAND = 1 << 30  # bytes


@dataclass(frozen=True)
class TraceHeader:
    """What was traced: `model` is the identity of its weights, `next_layer` how many experts of
    each next layer are noted as expected (0: none)."""

    model: str
    layers: int
    experts: int
    top_k: int
    expert_bytes: int
    next_layer: int = 0


@dataclass(frozen=True)
class CommandTrace:
    """One command: ids uint16 and weights float16, both [tokens, layers, top_k]; next_layer uint16
    [tokens - prompt, layers - 1, header.next_layer], None where it was not noted."""

    command_class: str
    prompt: int
    ids: NDArray[np.uint16]
    weights: NDArray[np.float16]
    next_layer: NDArray[np.uint16] | None = None


class TraceWriter:
    """Appends commands to a trace file.

    `size`: bytes of a file to go on with, of which the rest is cut off; 0: a new file, in place of
    one that is there. Raises EmberdError when the file cannot be written, or is shorter than that.
    """

    def __init__(self, path: Path, header: TraceHeader, size: int = 0) -> None:
        self._path = path
        try:
            self._file: BinaryIO = path.open("r+b" if size else "wb")
            if size and os.fstat(self._file.fileno()).st_size < size:
                self._file.close()
                raise EmberdError(f"{path}: shorter than when it was left; begin again without it")
            self._file.truncate(size)
            self._file.seek(size)
        except OSError as error:
            raise EmberdError(f"cannot write {path}: {error.strerror}") from error
        if not size:
            self._write({"format": FORMAT, "version": VERSION, **asdict(header)})

    def append(self, command: CommandTrace) -> None:
        """Raises EmberdError when the disk is full."""
        expected = command.next_layer
        self._write(
            {
                "class": command.command_class,
                "prompt": command.prompt,
                "ids": command.ids.astype("<u2").tobytes(),
                "weights": command.weights.astype("<f2").tobytes(),
                "next_layer": b"" if expected is None else expected.astype("<u2").tobytes(),
            }
        )

    def sync(self) -> int:
        """Makes what was appended safe; returns the size of the file."""
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise EmberdError(f"cannot write {self._path}: {error.strerror}") from error
        return self._file.tell()

    def finish(self, commands: int) -> None:
        """Ends the file: it has all of its `commands`."""
        self._write({"commands": commands})
        self.sync()

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:
            raise EmberdError(f"cannot write {self._path}: {error.strerror}") from error

    def _write(self, members: dict[str, Any]) -> None:
        try:
            self._file.write(msgpack.packb(members))
        except OSError as error:
            raise EmberdError(f"cannot write {self._path}: {error.strerror}") from error


class Trace:
    """A trace file, read a command at a time; iterate over it as often as wanted.

    Raises EmberdError when the file is no trace, and while iterating when it is damaged or does not
    have all of its commands.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        first = next(self._records(), None)
        if first is None or first.members.get("format") != FORMAT:
            raise EmberdError(f"{path}: not a trace; emberc profile --trace writes them")
        if first.members.get("version") != VERSION:
            raise EmberdError(
                f"{path}: version {first.members.get('version')!r:.80}, this emberc reads {VERSION}"
            )
        experts = first.integer("experts", 1, 1 << 16)
        self.header = TraceHeader(
            model=first.string("model"),
            layers=first.integer("layers", 1, INT32_MAX),
            experts=experts,
            top_k=first.integer("top_k", 1, experts),
            expert_bytes=first.integer("expert_bytes", 1, INT64_MAX),
            next_layer=first.integer("next_layer", 0, experts),
        )

    def __iter__(self) -> Iterator[CommandTrace]:
        records = self._records()
        next(records)
        count = 0
        for record in records:
            if "commands" in record.members:
                record.integer("commands", count, count)
                return
            yield self._command(record)
            count += 1
        raise EmberdError(
            f"{self._path}: ends after {count} commands, before it is complete: emberc profile was "
            "stopped; run it again with the same arguments, and it goes on"
        )

    def _records(self) -> Iterator[Record]:
        try:
            with self._path.open("rb") as file:
                unpacker = msgpack.Unpacker(file, max_buffer_size=_LARGEST_COMMAND)
                for number, members in enumerate(unpacker):
                    if number == 0 and not isinstance(members, dict):
                        return  # no trace's header
                    yield Record(members, f"{self._path}: command {number}")
        except OSError as error:
            raise EmberdError(f"{self._path}: cannot be read: {error.strerror}") from error
        except (ValueError, msgpack.exceptions.UnpackException, RecursionError) as error:
            raise EmberdError(f"{self._path}: damaged: {error}") from error

    def _command(self, record: Record) -> CommandTrace:
        header = self.header
        shape = (-1, header.layers, header.top_k)
        unit = 2 * header.layers * header.top_k
        ids = np.frombuffer(record.packed("ids", unit), "<u2").reshape(shape)
        weights = np.frombuffer(record.packed("weights", unit), "<f2").reshape(shape)
        prompt = record.integer("prompt", 0, len(ids))
        if not len(ids) or ids.shape != weights.shape or ids.max() >= header.experts:
            raise EmberdError(
                f"{record.name('ids')}: expected experts below {header.experts} with a weight each"
            )
        if _any_twice(ids):
            raise EmberdError(f"{record.name('ids')}: a token has an expert twice")
        expected = self._next_layer(record, len(ids) - prompt)
        return CommandTrace(record.string("class"), prompt, ids, weights, expected)

    def _next_layer(self, record: Record, tokens: int) -> NDArray[np.uint16] | None:
        header = self.header
        found = np.frombuffer(record.packed("next_layer", 2), "<u2")
        if not found.size:
            return None
        shape = (tokens, header.layers - 1, header.next_layer)
        if found.size != math.prod(shape) or found.max() >= header.experts:
            raise EmberdError(
                f"{record.name('next_layer')}: expected {math.prod(shape)} experts below "
                f"{header.experts}"
            )
        if _any_twice(found.reshape(shape)):
            raise EmberdError(f"{record.name('next_layer')}: a token has an expert twice")
        return found.reshape(shape)


def _any_twice(ids: NDArray[np.uint16]) -> bool:
    ordered = np.sort(ids, axis=-1)
    return bool((ordered[..., 1:] == ordered[..., :-1]).any())
