"""Token rows as integers, in scratch memory: the kernels' side of compile.quantize.activations."""

from __future__ import annotations

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


@dataclass(frozen=True)
class Plane:
    """The high or the low integers of rows."""

    values: Buffer  # int8 [rows, columns]
    sums: Buffer  # int32 [rows, columns / 32]: of each group

    @staticmethod
    def arguments(prefix: str, rows: Dimension, columns: int) -> Plane:
        return Plane(
            T.arg(f"{prefix}_values", T.buffer((rows, columns), "int8")),
            T.arg(f"{prefix}_sums", T.buffer((rows, columns // GROUP), "int32")),
        )

    def store_group(self, vectors: list[Expr], row: Expr, group: Expr) -> None:
        """Stores 32 integers (int32 vectors of equal lanes) as group `group` of row `row`."""
        lanes = GROUP // len(vectors)
        total = broadcast(T.int32(0), lanes)
        for i, vector in enumerate(vectors):
            total = T.Bind(total + vector)
            values = T.Cast(vector_type("int8", lanes), vector)
            store(self.values, values, [row, group * GROUP + i * lanes])
        store(self.sums, sum_lanes(total), [row, group])

    def quads(self, row: Expr, group: Expr) -> list[Expr]:
        """A group, four values in each int32."""
        return [
            T.reinterpret("int32", load(self.values, [row, group * GROUP + i], 4))
            for i in range(0, GROUP, 4)
        ]


@dataclass(frozen=True)
class Activations:
    """Token rows quantised in groups of 32: scratch buffers of a kernel.

    One plane for int8; a high and a low one for int16.
    """

    precision: Precision
    scales: Buffer  # float32 [rows, columns / 32]: of the lowest plane
    planes: tuple[Plane, ...]

    @staticmethod
    def arguments(prefix: str, rows: Dimension, columns: int, precision: Precision) -> Activations:
        """Declares the scratch arguments, in the order of `scratch`."""
        scales = T.arg(f"{prefix}_scales", T.buffer((rows, columns // GROUP), "float32"))
        names = ("high", "low")[: _plane_count(precision)]
        planes = tuple(Plane.arguments(f"{prefix}_{name}", rows, columns) for name in names)
        return Activations(precision, scales, planes)

    @staticmethod
    def scratch(rows: int, columns: int, precision: Precision) -> Scratch:
        groups = columns // GROUP
        plane: Scratch = [("int8", (rows, columns)), ("int32", (rows, groups))]
        return [("float32", (rows, groups)), *plane * _plane_count(precision)]

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
        scaled = [vector * broadcast(inverse, lanes) for vector in vectors]
        if len(self.planes) == 2:
            scaled = [rounded(vector) for vector in scaled]
        high = [round_to_int(vector) for vector in scaled]
        self.planes[0].store_group(high, row, group)
        if len(self.planes) == 2:
            floats = vector_type("float32", lanes)
            left = [
                rounded((vector - T.Cast(floats, integer)) * constant(PLANE_RATIO, lanes))
                for vector, integer in zip(scaled, high, strict=True)
            ]
            self.planes[1].store_group([round_to_int(vector) for vector in left], row, group)

    def store_row(self, isa: Isa, x: Buffer, source: Expr, row: Expr) -> None:
        """Quantises row `source` of x as row `row`."""
        with T.serial(0, int(x.shape[1]) // GROUP) as group:
            vectors = [
                load(x, [source, group * GROUP + i], isa.lanes) for i in range(0, GROUP, isa.lanes)
            ]
            self.store_group(vectors, row, group)


def types_suffix(weight_format: str, precision: Precision) -> str:
    """How a kernel's name tells its number types: q4a8 is q4 with int8 activations."""
    return weight_format + {"int8": "a8", "int16": "a16", "float32": ""}[precision]


def _plane_count(precision: Precision) -> int:
    return 2 if precision == "int16" else 1
