"""Activations as integers: what they hold, and how finely."""

import numpy as np
import pytest
from emberd.compile.quantize.activations import (
    STEPS,
    Precision,
    quantise_activations,
    quantise_reference,
)

PRECISIONS: list[Precision] = ["int8", "int16"]


def _x() -> np.ndarray:
    generator = np.random.default_rng(0)
    loud = np.float32(2) ** generator.integers(-60, 60, (50, 1))
    return generator.standard_normal((50, 96)).astype(np.float32) * loud.astype(np.float32)


@pytest.mark.parametrize("activations", PRECISIONS)
def test_error_is_half_a_step_of_the_largest_of_a_group(activations: Precision) -> None:
    x = _x()
    groups = x.reshape(50, -1, 32).astype(np.float64)
    error = np.abs(quantise_reference(x, activations).reshape(groups.shape) - groups)
    step = np.abs(groups).max(-1, keepdims=True) / STEPS[activations]
    # Products in float32 add up to a part in 2^22 of the largest.
    slack = STEPS[activations] / 2**22
    assert (error <= step * (0.5 + slack)).all()
    assert (error > step * 0.49).any()


def test_high_plane_is_int8() -> None:
    x = _x()
    (only,), coarse = quantise_activations(x, "int8")
    (high, _low), fine = quantise_activations(x, "int16")
    np.testing.assert_array_equal(high, only)
    np.testing.assert_allclose(fine * 254, coarse, rtol=1e-6)


def test_planes_stay_within_seven_bits_and_a_sign() -> None:
    """The integer dot products of some instruction sets have no room for -128."""
    halves = np.linspace(-1, 1, 32 * 4000 + 1, dtype=np.float32)[:-1].reshape(-1, 32)
    halves[:, 0] = 1
    planes, _ = quantise_activations(halves, "int16")
    assert planes[0].min() == planes[1].min() == -127
    assert planes[0].max() == planes[1].max() == 127


@pytest.mark.parametrize("activations", PRECISIONS)
def test_silence_is_zero(activations: Precision) -> None:
    x = np.zeros((2, 64), np.float32)
    x[1] = 1e-40
    assert not quantise_reference(x, activations).any()


def test_float32_is_kept() -> None:
    np.testing.assert_array_equal(quantise_reference(_x(), "float32"), _x())
