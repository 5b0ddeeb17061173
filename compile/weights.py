"""References to weights inside checkpoint shards, and the reader that follows them."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from emberd.daemon.errors import EmberdError

_STORED: dict[str, np.dtype] = {
    "f32": np.dtype("<f4"),
    "f16": np.dtype("<f2"),
    "bf16": np.dtype("<u2"),  # numpy has no bfloat16: its bits are the upper half of a float32
}
_MAGNITUDE_BITS = {"f32": 0x7FFFFFFF, "f16": 0x7FFF, "bf16": 0x7FFF}
# From 2^64 on a number's square is no float32, and what reads the weight computes infinities; no
# float16 comes near.
_TOO_LARGE_BITS = {"f32": 0x5F800000, "f16": 0x7C00, "bf16": 0x5F80}
_CHUNK_BYTES = 1 << 20  # small enough that a chunk read is still in cache when it is converted

DTYPES = tuple(_STORED)


@dataclass(frozen=True)
class Shard:
    """One weight file of the checkpoint and the size it had when it was converted."""

    path: Path
    bytes: int


@dataclass(frozen=True)
class Piece:
    """A contiguous run of a weight's elements; `offset` is in bytes from the start of the file."""

    shard: str
    offset: int


@dataclass(frozen=True)
class WeightReference:
    """A tensor in C order, stored as equally long pieces that follow one another.

    Nearly always one piece; a bank of experts has several where the checkpoint stores every expert
    as a tensor of its own. `name` is the tensor's name in the checkpoint.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.elements * self.item_bytes

    @property
    def item_bytes(self) -> int:
        return _STORED[self.dtype].itemsize

    @property
    def piece_bytes(self) -> int:
        return self.bytes // len(self.pieces)


class WeightReader:
    """Reads parts of weights from their shards, never more than is asked for.

    It reads instead of mapping: a file that shrinks meanwhile gives an error and not SIGBUS, and a
    checkpoint of any size passes under a limit on address space. Several threads may read.
    """

    def __init__(self, shards: Mapping[str, Shard]) -> None:
        self._shards = shards
        self._descriptors: dict[str, int] = {}
        self._opening = threading.Lock()

    def read(
        self, reference: WeightReference, first: int = 0, count: int | None = None
    ) -> np.ndarray:
        """`count` elements from element `first` on as float32, flat. Raises EmberdError."""
        count = reference.elements - first if count is None else count
        result = np.empty(count, np.float32)
        done = 0
        for chunk in self._chunks(reference, first, count):
            part = result[done : done + chunk.size]
            if reference.dtype == "bf16":
                np.left_shift(chunk, 16, out=part.view(np.uint32), dtype=np.uint32)
            else:
                part[:] = chunk
            done += chunk.size
        return result

    def check_magnitudes(self, reference: WeightReference) -> None:
        """Raise EmberdError at the first NaN, infinity, or number whose square is no float32.

        Takes a few MB of memory whatever the size.
        """
        magnitude, limit = _MAGNITUDE_BITS[reference.dtype], _TOO_LARGE_BITS[reference.dtype]
        done = 0
        for chunk in self._chunks(reference, 0, reference.elements):
            bits = chunk.view(np.dtype(f"<u{reference.item_bytes}"))
            bits &= bits.dtype.type(magnitude)
            if bits.max(initial=0) >= limit:
                self._fail_too_large(reference, done + int(np.argmax(bits >= limit)))
            done += chunk.size

    def close(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def _chunks(self, reference: WeightReference, first: int, count: int) -> Iterator[np.ndarray]:
        """The stored elements in order; a chunk is overwritten by the next one."""
        if first < 0 or count < 0 or first + count > reference.elements:
            raise ValueError(f"{reference.name}: elements {first}..{first + count} do not exist")
        buffer = np.empty(_CHUNK_BYTES // reference.item_bytes, _STORED[reference.dtype])
        piece_elements = reference.elements // len(reference.pieces)
        while count:
            index, within = divmod(first, piece_elements)
            size = min(count, buffer.size, piece_elements - within)
            piece = reference.pieces[index]
            chunk = buffer[:size]
            self._fill(chunk, piece.shard, piece.offset + within * reference.item_bytes, reference)
            yield chunk
            first += size
            count -= size

    def _fill(self, chunk: np.ndarray, shard: str, offset: int, reference: WeightReference) -> None:
        path = self._shards[shard].path
        view = chunk.data.cast("B")
        try:
            with self._opening:
                if shard not in self._descriptors:
                    self._descriptors[shard] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            while view:
                size = os.preadv(self._descriptors[shard], [view], offset)
                if not size:
                    raise EmberdError(
                        f"{path}: ends inside tensor {reference.name}, {len(view)} bytes short; "
                        "the file is truncated or was changed, fetch it again"
                    )
                view, offset = view[size:], offset + size
        except OSError as error:
            raise EmberdError(
                f"{path}: cannot read tensor {reference.name}: {error.strerror}"
            ) from error

    def _fail_too_large(self, reference: WeightReference, element: int) -> None:
        path = self._shards[self._piece_of(reference, element).shard].path
        place = [int(index) for index in np.unravel_index(element, reference.shape)]
        value = float(self.read(reference, element, 1)[0])
        what = (
            "a NaN" if math.isnan(value) else "an infinity" if math.isinf(value) else f"{value:g}"
        )
        raise EmberdError(
            f"{path}: tensor {reference.name} holds {what} at {place}; expected finite weights "
            "below 1.8e19: the file is damaged or its training diverged"
        )

    @staticmethod
    def _piece_of(reference: WeightReference, element: int) -> Piece:
        return reference.pieces[element * len(reference.pieces) // reference.elements]
