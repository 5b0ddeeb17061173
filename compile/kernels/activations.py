"""Token rows as integers, in scratch memory: the kernels' side of compile.quantize.activations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from emberd.compile.isa.isa import Isa
from emberd.compile.isa.vector import (
    Buffer,
    Expr,
    absolute,
    broadcast,
    constant,
    intrinsic,
    load,
    max_lanes,
    round_to_int,
    rounded,
    store,
    sum_lanes,
    vector_type,
)
from emberd.compile.kernels.dimensions import Dimension, Scratch
from emberd.compile.quantize.activations import PLANE_RATIO, SMALLEST, STEPS, Precision
from emberd.compile.quantize.formats import GROUP
from tvm.script import tirx as T  # noqa: N812

_PADDING = 64  # bytes behind a row: the lines of several rows must not share a set of the cache


@dataclass(frozen=True)
class Activations:
    """Token rows quantised in groups of 32, for weights with a zero point: scratch of a kernel."""

    precision: Precision
    zero_point: int
    scales: Buffer  # float32 [rows, columns / 32]: of the lowest plane
    biases: Buffer  # int32 [rows, columns / 32]: -zero_point * the sum of the group
    values: Buffer  # int8 [rows, planes * columns + padding]: of a group the high plane, the low

    @staticmethod
    def arguments(
        prefix: str, rows: Dimension, columns: int, precision: Precision, zero_point: int
    ) -> Activations:
        """Declares the scratch arguments, in the order of `scratch`."""
        shape = (rows, columns // GROUP)
        return Activations(
            precision,
            zero_point,
            T.arg(f"{prefix}_scales", T.buffer(shape, "float32")),
            T.arg(f"{prefix}_biases", T.buffer(shape, "int32")),
            T.arg(f"{prefix}_values", T.buffer((rows, _pitch(columns, precision)), "int8")),
        )

    @staticmethod
    def scratch(rows: int, columns: int, precision: Precision) -> Scratch:
        shape = (rows, columns // GROUP)
        return [
            ("float32", shape),
            ("int32", shape),
            ("int8", (rows, _pitch(columns, precision))),
        ]

    def planes(self, row: Expr, group: Expr) -> list[list[Expr]]:
        """The planes of a group, four values in each int32."""
        count = _plane_count(self.precision)
        starts = [T.Bind((group * count + plane) * GROUP) for plane in range(count)]
        return [
            [
                T.reinterpret("int32", load(self.values, [row, start + i], 4))
                for i in range(0, GROUP, 4)
            ]
            for start in starts
        ]

    def store_group(self, vectors: list[Expr], row: Expr, group: Expr) -> None:
        """Quantises 32 floats (in vectors of equal lanes) as group `group` of row `row`."""
        lanes = GROUP // len(vectors)
        # Floats without a sign are ordered as their bits are.
        integers = vector_type("int32", lanes)
        magnitudes = [T.Bind(T.reinterpret(integers, absolute(vector))) for vector in vectors]
        largest = magnitudes[0]
        for magnitude in magnitudes[1:]:
            largest = T.Bind(intrinsic(integers, "llvm.smax", largest, magnitude))
        largest = T.Bind(T.reinterpret("float32", max_lanes(largest)))
        inverse = T.Bind(
            T.Select(largest > T.float32(SMALLEST), T.float32(127.0) / largest, T.float32(0.0))
        )
        scale = largest * T.float32(float(np.float32(1 / STEPS[self.precision])))
        store(self.scales, scale, [row, group])
        planes = self._planes_of([vector * broadcast(inverse, lanes) for vector in vectors])
        total = broadcast(T.int32(0), lanes)
        for number, plane in enumerate(planes):
            weight = PLANE_RATIO ** (len(planes) - 1 - number)
            for i, vector in enumerate(plane):
                total = T.Bind(total + vector * broadcast(T.int32(weight), lanes))
                at = (group * len(planes) + number) * GROUP + i * lanes
                store(self.values, T.Cast(vector_type("int8", lanes), vector), [row, at])
        store(self.biases, sum_lanes(total) * T.int32(-self.zero_point), [row, group])

    def _planes_of(self, scaled: list[Expr]) -> list[list[Expr]]:
        """The integers of each plane, for floats of -127..127."""
        if self.precision == "int8":
            return [[round_to_int(vector) for vector in scaled]]
        lanes = GROUP // len(scaled)
        scaled = [rounded(vector) for vector in scaled]
        high = [round_to_int(vector) for vector in scaled]
        left = [
            rounded(
                (vector - T.Cast(vector_type("float32", lanes), integer))
                * constant(PLANE_RATIO, lanes)
            )
            for vector, integer in zip(scaled, high, strict=True)
        ]
        return [high, [round_to_int(vector) for vector in left]]

    def store_row(self, isa: Isa, values: Callable[[Expr, int], Expr], row: Expr) -> None:
        """Quantises row `row`, of which values(column, lanes) are that many float32."""
        with T.serial(0, int(self.scales.shape[1])) as group:
            vectors = [values(group * GROUP + i, isa.lanes) for i in range(0, GROUP, isa.lanes)]
            self.store_group(vectors, row, group)


def types_suffix(weight_format: str, precision: Precision) -> str:
    """How a kernel's name tells its number types: q4a8 is q4 with int8 activations."""
    return weight_format + {"int8": "a8", "int16": "a16", "float32": ""}[precision]


def _plane_count(precision: Precision) -> int:
    return 2 if precision == "int16" else 1


def _pitch(columns: int, precision: Precision) -> int:
    return columns * _plane_count(precision) + _PADDING
