"""Packing keeps the weights within the error of their format, whatever the shape."""

import numpy as np
import pytest
from emberd.compile.quantize.formats import (
    FORMATS,
    Format,
    expert_bytes,
    pack_expert,
    unpack_expert,
)
from emberd.daemon.errors import EmberdError

SHAPES = [(16, 64), (1, 32), (17, 96), (40, 160), (150, 128), (300, 64)]


def _weights(rows: int, columns: int) -> np.ndarray:
    generator = np.random.default_rng(rows * 1000 + columns)
    return generator.standard_normal((rows, columns)).astype(np.float32)


@pytest.fixture(params=["q8", "q4"])
def grouped(request: pytest.FixtureRequest) -> Format:
    return FORMATS[request.param]


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_unpacked_weights_are_within_a_step_of_the_original(
    grouped: Format, rows: int, columns: int
) -> None:
    weights = _weights(rows, columns)
    packed = grouped.pack(weights)
    assert packed.dtype == np.uint8 and packed.size == grouped.packed_bytes(rows, columns)
    unpacked = grouped.unpack(packed, rows, columns)
    groups = weights.reshape(rows, -1, 32)
    largest = np.abs(groups).max(axis=-1, keepdims=True)
    # Half a step; a whole one for the side that the asymmetric 4-bit range cuts at 7.
    step = largest / 8 if grouped.name == "q4" else largest / 127 / 2
    assert (np.abs(unpacked.reshape(groups.shape) - groups) <= step * 1.002).all()


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_packing_is_idempotent(grouped: Format, rows: int, columns: int) -> None:
    unpacked = grouped.unpack(grouped.pack(_weights(rows, columns)), rows, columns)
    packed = grouped.pack(unpacked)
    np.testing.assert_allclose(grouped.unpack(packed, rows, columns), unpacked, rtol=1e-3)


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.parametrize("magnitude", [1.0, 1e-6, 1e4])
def test_packed_bytes_are_those_of_the_definition(
    grouped: Format, rows: int, columns: int, magnitude: float
) -> None:
    weights = _weights(rows, columns) * np.float32(magnitude)
    assert bytes(grouped.pack(weights)) == _packed_by_definition(grouped.name, weights)


def _packed_by_definition(name: str, weights: np.ndarray) -> bytes:
    """What the module's description says, one group of one row after the other."""
    rows, columns = -(-weights.shape[0] // 16) * 16, -(-weights.shape[1] // 64) * 64
    padded = np.zeros((rows, columns), np.float32)
    padded[: weights.shape[0], : weights.shape[1]] = weights
    packed = b""
    for tile in range(0, rows, 16):
        for block in range(0, columns, 64):
            scales, data = np.zeros((2, 16), np.float16), []
            for half in range(2):
                values = np.zeros((16, 32), np.uint8)
                for row in range(16):
                    start = block + 32 * half
                    group = padded[tile + row, start : start + 32]
                    scales[half, row], values[row] = _quantised_group(name, group)
                if name == "q4":
                    values = values[:, :16] | values[:, 16:] << 4
                data += [values[:, j : j + 4].tobytes() for j in range(0, values.shape[1], 4)]
            packed += scales.tobytes() + b"".join(data)
    return packed


def _quantised_group(name: str, group: np.ndarray) -> tuple[np.float16, np.ndarray]:
    if name == "q4":
        low, high = group.min(), group.max()
        scale, zero, allowed = (low if -low >= high else high) / np.float32(-8), 8, (0, 15)
    else:
        scale, zero, allowed = np.abs(group).max() / np.float32(127), 128, (1, 255)
    stored = np.float16(scale) + np.float16(0)
    inverse = 1 / np.float32(stored) if stored else np.float32(0)
    return stored, np.clip(np.rint(group * inverse) + zero, *allowed).astype(np.uint8)


def test_layout_of_q4_block() -> None:
    weights = np.zeros((16, 64), np.float32)
    weights[3, 0] = -8.0  # scale 1, integer 0
    weights[3, 4 * 2 + 1] = 5.0
    weights[3, 16 + 4 * 2 + 1] = -3.0
    packed = FORMATS["q4"].pack(weights)
    assert packed.size == 576
    assert packed[:64].view(np.float16).reshape(2, 16)[0, 3] == 1.0
    nibbles = packed[64:].reshape(2, 4, 16, 4)
    assert nibbles[0, 2, 3, 1] == (5 + 8) | (-3 + 8) << 4
    assert nibbles[0, 0, 3, 0] & 15 == 0


def test_layout_of_q8_block() -> None:
    weights = np.zeros((16, 64), np.float32)
    weights[3, 32 + 4 * 2 + 1] = -127.0
    packed = FORMATS["q8"].pack(weights)
    assert packed.size == 1088
    assert packed[:64].view(np.float16).reshape(2, 16)[1, 3] == 1.0
    assert packed[64:].reshape(2, 8, 16, 4)[1, 2, 3, 1] == 1


def test_f32_is_kept_exactly() -> None:
    weights = _weights(7, 13)
    packed = FORMATS["f32"].pack(weights)
    np.testing.assert_array_equal(FORMATS["f32"].unpack(packed, 7, 13), weights)


def test_zero_matrix_stays_zero(grouped: Format) -> None:
    zeros = np.zeros((20, 96), np.float32)
    assert not grouped.unpack(grouped.pack(zeros), 20, 96).any()


def test_columns_must_fill_groups(grouped: Format) -> None:
    with pytest.raises(EmberdError, match=r"multiple of 32, got 40 \(matrix of 16 x 40\)"):
        grouped.check(16, 40)
    with pytest.raises(EmberdError, match="multiple of 32"):
        grouped.pack(_weights(16, 40))


@pytest.mark.parametrize("name", FORMATS)
def test_empty_matrix_is_refused(name: str) -> None:
    with pytest.raises(EmberdError, match="empty"):
        FORMATS[name].check(0, 32)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e8])
def test_weights_without_a_finite_scale_are_refused(grouped: Format, bad: float) -> None:
    weights = _weights(16, 64)
    weights[5, 40] = bad
    with pytest.raises(EmberdError, match="not finite or too large"):
        grouped.pack(weights)


@pytest.mark.parametrize("bad", [np.nan, -np.inf, 2.0**64, -3e38])
def test_floats_without_a_finite_square_are_refused(bad: float) -> None:
    weights = np.full((3, 5), 1.8e19, np.float32)
    FORMATS["f32"].pack(weights)
    weights[2, 1] = bad
    with pytest.raises(EmberdError, match="so large that their squares are not"):
        FORMATS["f32"].pack(weights)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("hidden", "intermediate"), [(64, 32), (96, 160)])
def test_expert_holds_its_three_matrices(name: str, hidden: int, intermediate: int) -> None:
    weight_format = FORMATS[name]
    gate_up, down = _weights(2 * intermediate, hidden), _weights(hidden, intermediate)
    packed = pack_expert(weight_format, gate_up, down)
    assert packed.size == expert_bytes(weight_format, hidden, intermediate)
    assert packed.size % 4096 == 0
    unpacked_gate_up, unpacked_down = unpack_expert(weight_format, packed, hidden, intermediate)
    for unpacked, weights in ((unpacked_gate_up, gate_up), (unpacked_down, down)):
        expected = weight_format.unpack(weight_format.pack(weights), *weights.shape)
        np.testing.assert_array_equal(unpacked, expected)


def test_expert_refuses_a_bad_dimension(grouped: Format) -> None:
    with pytest.raises(EmberdError, match="multiple of 32"):
        expert_bytes(grouped, 64, 48)
