"""The header of a safetensors file: which bytes are which tensor.

Source: the format of the safetensors library (8 bytes little-endian header length, a JSON object,
the tensors' bytes), read as strictly as that library writes it.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from emberd.daemon.errors import EmberdError

MAX_HEADER_BYTES = 100_000_000
_LENGTH_BYTES = 8
_DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "F4": 4,
}  # fmt: skip


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file; `dtype` as safetensors spells it, `offset` in bytes from the start."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    bytes: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def read_header(file: Path) -> list[StoredTensor]:
    """All tensors of `file` in the order of their bytes.

    Raises EmberdError unless the header is well formed and its tensors tile the rest of the file
    exactly: no overlap, no gap, nothing beyond the end and nothing left over.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            prefix = stream.read(_LENGTH_BYTES)
            if len(prefix) < _LENGTH_BYTES:
                raise _error(file, f"{size} bytes are too few for a safetensors file")
            length = int.from_bytes(prefix, "little")
            if length > MAX_HEADER_BYTES or length > size - _LENGTH_BYTES:
                raise _error(
                    file, f"its header claims {length} bytes, but the file has {size}: truncated?"
                )
            header = stream.read(length)
    except OSError as error:
        raise EmberdError(f"{file}: cannot be read: {error.strerror}") from error
    start = _LENGTH_BYTES + length
    entries = _parse(file, header)
    entries.pop("__metadata__", None)
    tensors = [_tensor(file, name, entry, start) for name, entry in entries.items()]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.bytes))
    _check_tiling(file, tensors, start, size)
    return tensors


def _parse(file: Path, header: bytes) -> dict[str, Any]:
    try:
        entries = json.loads(header.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise _error(file, f"its header is not valid JSON: {error}") from error
    if not isinstance(entries, dict):
        raise _error(file, "its header is not a JSON object")
    return entries


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"'{next(n for n in names if names.count(n) > 1)}' appears twice")
    return result


def _tensor(file: Path, name: str, entry: Any, start: int) -> StoredTensor:
    if not isinstance(entry, dict):
        raise _error(file, f"tensor {name}: expected an object, found {entry!r:.60}")
    dtype: Any = entry.get("dtype")
    shape: Any = entry.get("shape")
    offsets: Any = entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _DTYPE_BITS:
        raise _error(file, f"tensor {name}: unknown dtype {dtype!r:.60}")
    if not _are_sizes(shape):
        raise _error(file, f"tensor {name}: expected a list of sizes as shape, found {shape!r:.60}")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _error(file, f"tensor {name}: expected [begin, end] offsets, found {offsets!r:.60}")
    begin, end = offsets
    bits = math.prod(shape) * _DTYPE_BITS[dtype]
    if bits != (end - begin) * 8:
        raise _error(
            file,
            f"tensor {name}: shape {shape} of {dtype} takes {-(-bits // 8)} bytes, "
            f"but its offsets {offsets} span {end - begin}",
        )
    return StoredTensor(name, file, dtype, tuple(shape), start + begin, end - begin)


def _are_sizes(value: Any) -> bool:
    """Whether value is a list of integers that fit 63 bits (few enough to multiply quickly)."""
    return (
        isinstance(value, list)
        and len(value) <= 16
        and all(type(item) is int and 0 <= item < 2**63 for item in value)
    )


def _check_tiling(file: Path, tensors: list[StoredTensor], start: int, size: int) -> None:
    position, previous = start, "the header"
    for tensor in tensors:
        if tensor.offset != position:
            what = "overlaps" if tensor.offset < position else "leaves a gap after"
            raise _error(
                file,
                f"tensor {tensor.name} {what} {previous}: expected it at byte {position}, "
                f"found {tensor.offset}",
            )
        position, previous = tensor.offset + tensor.bytes, tensor.name
        if position > size:
            raise _error(
                file,
                f"tensor {tensor.name} ends at byte {position}, but the file has {size}: truncated",
            )
    if position != size:
        raise _error(file, f"{size - position} bytes after the last tensor belong to none")


def _error(file: Path, reason: str) -> EmberdError:
    return EmberdError(f"{file}: not a sound safetensors file: {reason}")
