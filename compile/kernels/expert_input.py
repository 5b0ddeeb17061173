"""The input of experts, made ready once for all that read it."""

from __future__ import annotations

from typing import Protocol

from emberd.compile.isa.isa import Isa
from emberd.compile.isa.vector import Buffer, Expr
from emberd.compile.kernels.dimensions import Dimension, Scratch
from emberd.compile.kernels.experts import Experts
from emberd.compile.kernels.float_experts import FloatInput
from emberd.compile.kernels.grouped_experts import GroupedInput
from emberd.compile.quantize.activations import Precision
from emberd.compile.quantize.formats import Format, GroupFormat


class ExpertInput(Protocol):
    """Token rows x f32[T, H]. Experts are declared with the scratch of their hidden units."""

    def prepare(self, row: Expr) -> None:
        """Makes row `row` of x ready for the experts."""

    def routed(self, bank: Buffer, rows: Dimension, width: int) -> Experts:
        """Experts of `width` hidden units in the slots of a bank; `rows` of them are kept."""

    def shared(
        self, gate: Buffer, up: Buffer, down: Buffer, rows: Dimension, width: int
    ) -> Experts:
        """The expert of weights gate and up [width, H] and down [H, width]."""


def declare_input(isa: Isa, weight_format: Format, precision: Precision, x: Buffer) -> ExpertInput:
    """Declares the scratch arguments of the quantised x in the current PrimFunc."""
    if isinstance(weight_format, GroupFormat):
        return GroupedInput.create(isa, weight_format, precision, x)
    return FloatInput(isa, x)


def input_scratch(weight_format: Format, precision: Precision, tokens: int, hidden: int) -> Scratch:
    """What `declare_input` declares."""
    if isinstance(weight_format, GroupFormat):
        return GroupedInput.scratch(precision, tokens, hidden)
    return []


def units_scratch(weight_format: Format, precision: Precision, rows: int, width: int) -> Scratch:
    """What `routed` and `shared` declare."""
    if isinstance(weight_format, GroupFormat):
        return GroupedInput.units_scratch(precision, rows, width)
    return FloatInput.units_scratch(rows, width)
