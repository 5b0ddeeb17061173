"""Weight formats: how a matrix lies in the artifact and what its numbers become.

f32: row-major float32.

q8, q4: groups of 32 weights along the columns share one float16 scale d; a weight is
(q - zero_point) * d with q an unsigned 8 or 4 bit integer. The bytes are laid out for kernels that
compute 16 rows at a time and read one sequential stream: tiles of 16 rows, each a run of blocks of
64 columns, and a block is
    64 B   scales, float16 [2 groups][16 rows]
    then for each of the 2 groups
    q8     8 x 64 B, byte [j][row][b] holds column 4j + b
    q4     4 x 64 B, byte [j][row][b] holds column 4j + b in its low, 16 + 4j + b in its high nibble
Rows are padded to 16 and columns to 64 with zero weights. Every instruction set reads these bytes.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from emberd.daemon.errors import EmberdError
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

GROUP = 32  # columns that share one scale
TILE = 16  # rows computed together
BLOCK = 64  # columns of one packed block
SCALE_BYTES = 2 * TILE * 2  # of one block
LARGEST_FLOAT = 2.0**64  # weights are below; from there on squares are no float32
EXPERT_ALIGNMENT = 4096  # experts are read from storage one by one, past the page cache

# Packed at a time: few enough that intermediate arrays stay in cache, and enough that threads which
# pack side by side seldom meet at the interpreter's lock.
_ROWS_AT_ONCE = 256
_SIXTEEN_BYTES = np.complex128  # numpy has no longer integer to move many small items as one


class Format(Protocol):
    """A way to store a matrix [rows, columns]."""

    @property
    def name(self) -> str: ...

    def check(self, rows: int, columns: int) -> None:
        """Raises EmberdError when a matrix of this shape cannot be stored."""

    def packed_bytes(self, rows: int, columns: int) -> int:
        """Size of the packed matrix."""

    def pack(self, weights: Floats) -> Bytes:
        """float32 [rows, columns] -> uint8 [packed_bytes]; EmberdError on shape or non-finite."""

    def unpack(self, packed: Bytes, rows: int, columns: int) -> Floats:
        """The numbers the kernels multiply by, float32 [rows, columns]."""


@dataclass(frozen=True)
class FloatFormat:
    """Row-major float32, any shape."""

    name: str

    def check(self, rows: int, columns: int) -> None:
        if rows < 1 or columns < 1:
            raise EmberdError(f"{self.name}: a matrix of {rows} x {columns} is empty")

    def packed_bytes(self, rows: int, columns: int) -> int:
        self.check(rows, columns)
        return rows * columns * 4

    def pack(self, weights: Floats) -> Bytes:
        self.check(*weights.shape)
        if not np.abs(weights).max() < LARGEST_FLOAT:
            raise EmberdError(
                f"{self.name}: the matrix has weights that are not finite, or so large that their "
                "squares are not"
            )
        return np.ascontiguousarray(weights, np.float32).view(np.uint8).reshape(-1)

    def unpack(self, packed: Bytes, rows: int, columns: int) -> Floats:
        return packed[: self.packed_bytes(rows, columns)].view(np.float32).reshape(rows, columns)


@dataclass(frozen=True)
class GroupFormat:
    """`bits`-bit integers (4 or 8) with one float16 scale per group of 32 columns."""

    name: str
    bits: int

    @property
    def zero_point(self) -> int:
        """The stored integer that stands for 0."""
        return 1 << (self.bits - 1)

    @property
    def group_bytes(self) -> int:
        """Integers of one group of one tile."""
        return TILE * GROUP * self.bits // 8

    @property
    def block_bytes(self) -> int:
        """One block: 16 rows x 64 columns with their scales."""
        return SCALE_BYTES + 2 * self.group_bytes

    def tile_bytes(self, columns: int) -> int:
        """One tile: 16 rows."""
        return -(-columns // BLOCK) * self.block_bytes

    def check(self, rows: int, columns: int) -> None:
        if rows < 1 or columns < 1:
            raise EmberdError(f"{self.name}: a matrix of {rows} x {columns} is empty")
        if columns % GROUP:
            raise EmberdError(
                f"{self.name}: the input dimension of a matrix must be a multiple of {GROUP}, "
                f"got {columns} (matrix of {rows} x {columns}); keep it in f32"
            )

    def packed_bytes(self, rows: int, columns: int) -> int:
        self.check(rows, columns)
        return -(-rows // TILE) * self.tile_bytes(columns)

    def pack(self, weights: Floats) -> Bytes:
        rows, columns = weights.shape
        packed = np.empty(self.packed_bytes(rows, columns), np.uint8)
        tiles = packed.reshape(-1, self.tile_bytes(columns))
        for start in range(0, rows, _ROWS_AT_ONCE):
            part = self._pack_tiles(_padded(weights[start : start + _ROWS_AT_ONCE]))
            tiles[start // TILE : start // TILE + len(part)] = part
        return packed

    def unpack(self, packed: Bytes, rows: int, columns: int) -> Floats:
        blocks = packed[: self.packed_bytes(rows, columns)].reshape(
            -(-rows // TILE), -(-columns // BLOCK), self.block_bytes
        )
        tiles, count = blocks.shape[:2]
        scales = np.ascontiguousarray(blocks[..., :SCALE_BYTES]).view(np.float16)
        scales = scales.reshape(tiles, count, 2, TILE).transpose(0, 3, 1, 2)
        data = blocks[..., SCALE_BYTES:].reshape(tiles, count, 2, -1, TILE, 4)
        if self.bits == 4:
            data = np.concatenate([data & 15, data >> 4], axis=3)
        values = data.transpose(0, 4, 1, 2, 3, 5).reshape(tiles, TILE, count, 2, GROUP)
        weights = (values.astype(np.float32) - self.zero_point) * scales[..., None].astype(
            np.float32
        )
        return np.ascontiguousarray(weights.reshape(tiles * TILE, -1)[:rows, :columns])

    def _pack_tiles(self, weights: Floats) -> Bytes:
        """Rows a multiple of 16, columns of 64 -> uint8 [tiles, tile_bytes]."""
        tiles, count = weights.shape[0] // TILE, weights.shape[1] // BLOCK
        values, scales = self._quantise(weights.reshape(-1, GROUP))
        blocks = np.empty((tiles, count, self.block_bytes), np.uint8)
        blocks[..., :SCALE_BYTES] = (
            np.ascontiguousarray(scales.reshape(tiles, TILE, count, 2).transpose(0, 2, 3, 1))
            .view(np.uint8)
            .reshape(tiles, count, SCALE_BYTES)
        )
        if self.bits == 4:
            values = _nibbles(values)
        # Four columns travel as one 32-bit word.
        words = np.ascontiguousarray(values).view(np.uint32).reshape(tiles, TILE, count, 2, -1)
        blocks[..., SCALE_BYTES:] = (
            np.ascontiguousarray(words.transpose(0, 2, 3, 4, 1))
            .view(np.uint8)
            .reshape(tiles, count, 2 * self.group_bytes)
        )
        return blocks.reshape(tiles, -1)

    def _quantise(self, groups: Floats) -> tuple[Bytes, NDArray[np.float16]]:
        """float32 [n, 32] -> integers uint8 [n, 32], scales float16 [n].

        8 bits are symmetric (1..255). The 4-bit range -8..7 is not: the largest weight of a group
        is mapped to -8, whatever its sign, as in ggml's Q4_0.
        """
        high, low = _largest_and_smallest(groups)
        if self.bits == 4:
            steps = np.where(-low >= high, low, high) / np.float32(-8)
        else:
            steps = np.maximum(high, -low) / np.float32(127)
        steps += np.float32(0)  # of zeros alone it is 0, not -0, however a machine compares them
        with np.errstate(over="ignore"):  # found just below
            scales = steps.astype(np.float16)
        if not np.isfinite(scales).all():
            raise EmberdError(
                f"{self.name}: the matrix has weights that are not finite or too large for "
                "a float16 scale"
            )
        wide = scales.astype(np.float32)
        inverse = np.divide(1, wide, out=np.zeros_like(wide), where=wide != 0)
        values = groups * inverse[:, None]
        np.rint(values, out=values)
        values += np.float32(self.zero_point)
        lowest = 0 if self.bits == 4 else 1
        np.clip(values, lowest, (1 << self.bits) - 1, out=values)
        return values.astype(np.uint8), scales


def _largest_and_smallest(groups: Floats) -> tuple[Floats, Floats]:
    """float32 [n, 32] -> [n] each, NaN where a group holds one.

    Four columns are moved as one item to [8, n, 4]: numpy compares long rows many times as fast as
    it reduces short ones.
    """
    fours = np.ascontiguousarray(groups.view(_SIXTEEN_BYTES).T).view(np.float32)
    high, low = (bound(fours, axis=0).reshape(-1, 4).T for bound in (np.max, np.min))
    return (
        np.maximum(np.maximum(high[0], high[1]), np.maximum(high[2], high[3])),
        np.minimum(np.minimum(low[0], low[1]), np.minimum(low[2], low[3])),
    )


def _nibbles(values: Bytes) -> Bytes:
    """uint8 [n, 32] below 16 -> uint8 [n * 16]: columns 0..15 low, 16..31 high."""
    halves = values.view(_SIXTEEN_BYTES)
    low, high = (np.ascontiguousarray(halves[:, half]).view(np.uint64) for half in (0, 1))
    packed: Bytes = (low | (high << np.uint64(4))).view(np.uint8)
    return packed


def _padded(weights: Floats) -> Floats:
    """Zero rows up to a multiple of 16 and zero columns up to a multiple of 64."""
    rows, columns = weights.shape
    if rows % TILE == 0 and columns % BLOCK == 0:
        return np.ascontiguousarray(weights, np.float32)
    padded = np.zeros((-(-rows // TILE) * TILE, -(-columns // BLOCK) * BLOCK), np.float32)
    padded[:rows, :columns] = weights
    return padded


F32 = FloatFormat("f32")
Q8 = GroupFormat("q8", 8)
Q4 = GroupFormat("q4", 4)
FORMATS: dict[str, Format] = {"f32": F32, "q8": Q8, "q4": Q4}


def expert_bytes(weight_format: Format, hidden: int, intermediate: int) -> int:
    """Size of one packed expert, a multiple of 4096.

    hidden H, intermediate I: gate and up [I, H] each, down [H, I]. EmberdError on a bad dimension.
    """
    gate_up = weight_format.packed_bytes(2 * intermediate, hidden)
    down = weight_format.packed_bytes(hidden, intermediate)
    return -(-(gate_up + down) // EXPERT_ALIGNMENT) * EXPERT_ALIGNMENT


def pack_expert(weight_format: Format, gate_up: Floats, down: Floats) -> Bytes:
    """gate_up float32 [2I, H] (gate first), down float32 [H, I] -> uint8 [expert_bytes].

    q8 and q4: rows of gate and up alternate in runs of 32, so that the kernel finishes the hidden
    units of one quantisation group without leaving its stream; then down; then zeros.
    """
    hidden, intermediate = down.shape
    packed = np.zeros(expert_bytes(weight_format, hidden, intermediate), np.uint8)
    size = weight_format.packed_bytes(2 * intermediate, hidden)
    gate_up_packed = weight_format.pack(gate_up)
    if isinstance(weight_format, GroupFormat):
        run = GROUP // TILE * weight_format.tile_bytes(hidden)
        alternating = packed[:size].reshape(-1, 2, run)
        alternating[:] = gate_up_packed.reshape(2, -1, run).swapaxes(0, 1)
    else:
        packed[:size] = gate_up_packed
    down_packed = weight_format.pack(down)
    packed[size : size + len(down_packed)] = down_packed
    return packed


def unpack_expert(
    weight_format: Format, packed: Bytes, hidden: int, intermediate: int
) -> tuple[Floats, Floats]:
    """The gate_up [2I, H] (gate first) and down [H, I] that the kernels multiply by."""
    size = weight_format.packed_bytes(2 * intermediate, hidden)
    gate_up = weight_format.unpack(packed[:size], 2 * intermediate, hidden)
    if isinstance(weight_format, GroupFormat):
        gate_up = gate_up.reshape(-1, 2, GROUP, hidden).swapaxes(0, 1).reshape(gate_up.shape)
    return gate_up, weight_format.unpack(packed[size:], hidden, intermediate)
