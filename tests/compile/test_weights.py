"""Reading parts of weights, and finding the numbers that no weight may be."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from emberd.compile.weights import Piece, Shard, WeightReader, WeightReference
from emberd.daemon.errors import EmberdError

STORED = {"f32": "<u4", "f16": "<u2", "bf16": "<u2"}
NAN = {"f32": 0x7FC00000, "f16": 0x7E00, "bf16": 0xFFC0}
INFINITY = {"f32": 0xFF800000, "f16": 0x7C00, "bf16": 0x7F80}
HUGE = {"f32": 0x5F800000, "bf16": 0xDF80}  # 2^64, and -2^64: their square is infinite
LARGEST = {"f32": 0x5F7FFFFF, "f16": 0xFBFF, "bf16": 0xDF7F}
HEADER = 8  # bytes in front of the elements, so that offsets count

by_dtype = pytest.mark.parametrize("dtype", STORED)


@pytest.fixture
def store(tmp_path: Path) -> Callable[..., tuple[WeightReader, WeightReference]]:
    """Store bits as a weight in pieces, last piece first, and open it."""

    def build(
        bits: np.ndarray, dtype: str, shape: tuple[int, ...], pieces: int = 1
    ) -> tuple[WeightReader, WeightReference]:
        file = tmp_path / "weights"
        parts = np.split(bits.astype(STORED[dtype]), pieces)
        file.write_bytes(bytes(HEADER) + b"".join(part.tobytes() for part in reversed(parts)))
        offsets = [HEADER + parts[0].nbytes * place for place in reversed(range(pieces))]
        reference = WeightReference("w", dtype, shape, tuple(Piece("s", at) for at in offsets))
        return WeightReader({"s": Shard(file, file.stat().st_size)}), reference

    return build


@by_dtype
@pytest.mark.parametrize("pieces", [1, 4])
def test_any_part_is_read_as_float32(
    store: Callable[..., tuple[WeightReader, WeightReference]], dtype: str, pieces: int
) -> None:
    values = np.random.default_rng(5).standard_normal(60).astype(np.float32)
    if dtype == "bf16":
        bits = values.view(np.uint32) >> 16
        values = (bits << 16).astype(np.uint32).view(np.float32)
    elif dtype == "f16":
        bits = values.astype(np.float16).view(np.uint16)
        values = values.astype(np.float16).astype(np.float32)
    else:
        bits = values.view(np.uint32)
    reader, reference = store(bits, dtype, (4, 15), pieces)
    for first, count in ((0, 60), (0, 0), (7, 1), (10, 30), (14, 2), (59, 1)):
        read = reader.read(reference, first, count)
        assert read.dtype == np.float32
        np.testing.assert_array_equal(read, values[first : first + count])
    np.testing.assert_array_equal(reader.read(reference), values)
    with pytest.raises(ValueError, match="do not exist"):
        reader.read(reference, 59, 2)


@pytest.mark.parametrize("place", [0, 1_299_999, 2_599_999], ids=["first", "middle", "last"])
@pytest.mark.parametrize(
    ("dtype", "bad", "word"),
    [
        (dtype, bits[dtype], word)
        for bits, word in ((NAN, "a NaN"), (INFINITY, "an infinity"), (HUGE, r"-?1\.84467e\+19"))
        for dtype in bits
    ],
)
def test_numbers_that_no_weight_may_be_are_found(
    store: Callable[..., tuple[WeightReader, WeightReference]],
    place: int,
    dtype: str,
    bad: int,
    word: str,
) -> None:
    """Anywhere in a weight of several chunks; the largest allowed numbers pass."""
    bits = np.full(2_600_000, LARGEST[dtype], STORED[dtype])
    reader, reference = store(bits, dtype, (2, 1_300_000), 2)
    reader.check_magnitudes(reference)
    reader.close()
    bits[place] = bad
    reader, reference = store(bits, dtype, (2, 1_300_000), 2)
    row, column = divmod(place, 1_300_000)
    with pytest.raises(EmberdError, match=rf"tensor w holds {word} at \[{row}, {column}\]"):
        reader.check_magnitudes(reference)


def test_the_check_needs_little_memory(tmp_path: Path) -> None:
    """A sparse file stands for a large one."""
    file, size = tmp_path / "weights", 512 << 20
    with file.open("wb") as stream:
        stream.truncate(size)
    reader = WeightReader({"s": Shard(file, size)})
    tracemalloc.start()
    try:
        reader.check_magnitudes(WeightReference("w", "bf16", (size // 2,), (Piece("s", 0),)))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16 << 20


def test_files_that_shrank_or_vanished_give_errors(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(bytes(30))
    reference = WeightReference("w", "f32", (8,), (Piece("s", 0),))
    with pytest.raises(EmberdError, match="ends inside tensor w, 2 bytes short"):
        WeightReader({"s": Shard(file, 32)}).read(reference)
    file.unlink()
    with pytest.raises(EmberdError, match="cannot read tensor w: No such file"):
        WeightReader({"s": Shard(file, 32)}).read(reference)
