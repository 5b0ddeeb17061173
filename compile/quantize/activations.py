"""Activations as integers: what a q8 or q4 matrix is multiplied with.

int8: groups of 32 along a row share a scale a / 127, with a the largest magnitude of the group, and
become integers of -127..127. Half as precise as weights at 8 bits, and twice as fast as int16.

int16: what int8 leaves over becomes a second integer of -127..127 at a step 254 times finer. Both
are int8, so that every instruction set multiplies two planes of bytes; together they are one
integer 254 * high + low of 15 bits. 254 and not 256, as a half step is then 127.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from emberd.compile.quantize.formats import GROUP
from numpy.typing import NDArray

Precision = Literal["float32", "int8", "int16"]
"""float32 is for matrices in f32."""

PLANE_RATIO = 254  # steps of the low plane in one of the high plane
SMALLEST = 2.0**-100  # a group whose largest activation is not above this counts as zero
STEPS = {"int8": 127, "int16": 127 * PLANE_RATIO}  # in the largest magnitude of a group


def quantise_activations(
    x: NDArray[np.float32], activations: Precision
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """x f32[T, K] -> planes int32[1 or 2, T, K] (high, low), scales f32[T, K / 32] of the lowest.

    Every operation is one of float32, rounded to nearest even: kernels compute the same bits.
    """
    groups = x.astype(np.float32).reshape(len(x), -1, GROUP)
    largest = np.abs(groups).max(axis=-1)
    inverse = np.divide(
        np.float32(127), largest, out=np.zeros_like(largest), where=largest > SMALLEST
    )
    scaled = groups * inverse[..., None]
    high = np.rint(scaled)
    planes = [high]
    if activations == "int16":
        planes.append(np.rint((scaled - high) * np.float32(PLANE_RATIO)))
    integers = np.stack(planes).astype(np.int32).reshape(len(planes), *x.shape)
    return integers, largest * np.float32(1 / STEPS[activations])


def quantise_reference(x: NDArray[np.float32], activations: Precision) -> NDArray[np.float32]:
    """x f32[T, K] as a matrix sees it: the integers times their scales."""
    if activations == "float32":
        return x
    planes, scales = quantise_activations(x, activations)
    integers = planes[0] if len(planes) == 1 else PLANE_RATIO * planes[0] + planes[1]
    result: NDArray[np.float32] = integers.astype(np.float32)
    result *= np.repeat(scales, GROUP, axis=-1)
    return result
