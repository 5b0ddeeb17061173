"""Experts with float32 weights, of any dimensions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from emberd.compile.isa.isa import Isa
from emberd.compile.isa.math import silu
from emberd.compile.isa.vector import Buffer, Expr, for_block, load, store, vector_type
from emberd.compile.kernels.dimensions import Dimension, Scratch
from emberd.compile.kernels.dot import FloatRow, RowMap, dot_float_rows, float_row
from emberd.compile.kernels.experts import Expect, Put
from tvm.script import tirx as T  # noqa: N812

_UNITS = 2  # hidden units computed together: four weight rows
_OUTPUTS = 4  # outputs computed together


class _Place(Protocol):
    """Where the weights of experts lie."""

    def gate(self, slot: Expr, unit: Expr) -> FloatRow: ...

    def up(self, slot: Expr, unit: Expr) -> FloatRow: ...

    def down(self, slot: Expr, output: Expr) -> FloatRow: ...


@dataclass(frozen=True)
class _Bank:
    """As `pack_expert` lays out the blob of a slot: gate rows, up rows, down rows."""

    hidden: int
    intermediate: int
    bank: Buffer

    def gate(self, slot: Expr, unit: Expr) -> FloatRow:
        return self._row(slot, unit, self.hidden, 0)

    def up(self, slot: Expr, unit: Expr) -> FloatRow:
        return self._row(slot, unit, self.hidden, self.intermediate * self.hidden)

    def down(self, slot: Expr, output: Expr) -> FloatRow:
        return self._row(slot, output, self.intermediate, 2 * self.intermediate * self.hidden)

    def _row(self, slot: Expr, row: Expr, columns: int, start: int) -> FloatRow:
        """A row of the matrix that begins at float `start` of the blob."""
        first = T.Cast("int64", row) * columns + start

        def load_row(column: Expr, lanes: int) -> Expr:
            values = load(self.bank, [slot, (first + column) * 4], 4 * lanes)
            return T.Bind(T.reinterpret(vector_type("float32", lanes), values))

        return load_row


@dataclass(frozen=True)
class _Matrices:
    """Three weights of the layer, of one expert: there is no slot."""

    gate_weight: Buffer
    up_weight: Buffer
    down_weight: Buffer

    def gate(self, _slot: Expr, unit: Expr) -> FloatRow:
        return float_row(self.gate_weight, unit)

    def up(self, _slot: Expr, unit: Expr) -> FloatRow:
        return float_row(self.up_weight, unit)

    def down(self, _slot: Expr, output: Expr) -> FloatRow:
        return float_row(self.down_weight, output)


@dataclass(frozen=True)
class FloatExperts:
    """See `Experts`."""

    isa: Isa
    hidden: int
    intermediate: int
    place: _Place
    x: Buffer
    units: Buffer  # float32 [rows, intermediate]

    @property
    def hidden_tasks(self) -> int:
        return -(-self.intermediate // _UNITS)

    @property
    def output_tasks(self) -> int:
        return -(-self.hidden // _OUTPUTS)

    def compute_hidden(
        self, slot: Expr, task: Expr, source: RowMap, target: RowMap, count: Expr | int
    ) -> None:
        def compute(count_units: int) -> None:
            units = [T.Bind(task * _UNITS + i) for i in range(count_units)]
            rows = [self.place.gate(slot, unit) for unit in units]
            rows += [self.place.up(slot, unit) for unit in units]
            with T.serial(0, count) as row:
                (sums,) = dot_float_rows(self.isa, rows, self.x, [T.Bind(source(row))])
                gates, ups = sums[:count_units], sums[count_units:]
                for unit, gate, up in zip(units, gates, ups, strict=True):
                    store(self.units, silu(gate) * up, [target(row), unit])

        for_block(task, self.intermediate, _UNITS, compute)

    def compute_output(
        self,
        slot: Expr,
        task: Expr,
        source: RowMap,
        count: Expr | int,
        put: Put,
        expect: Expect | None = None,
    ) -> None:
        def compute(count_outputs: int) -> None:
            outputs = [T.Bind(task * _OUTPUTS + i) for i in range(count_outputs)]
            rows = [self.place.down(slot, output) for output in outputs]
            with T.serial(0, count) as row:
                (sums,) = dot_float_rows(self.isa, rows, self.units, [T.Bind(source(row))])
                for output, value in zip(outputs, sums, strict=True):
                    put(row, output, value)

        for_block(task, self.hidden, _OUTPUTS, compute)


@dataclass(frozen=True)
class FloatInput:
    """See `ExpertInput`."""

    isa: Isa
    x: Buffer

    @staticmethod
    def units_scratch(rows: int, width: int) -> Scratch:
        return [("float32", (rows, width))]

    def prepare(self, row: Expr) -> None:
        """x is used as it is."""

    def routed(self, bank: Buffer, rows: Dimension, width: int) -> FloatExperts:
        return self._experts("units", _Bank(int(self.x.shape[1]), width, bank), rows, width)

    def shared(
        self, gate: Buffer, up: Buffer, down: Buffer, rows: Dimension, width: int
    ) -> FloatExperts:
        return self._experts("shared_units", _Matrices(gate, up, down), rows, width)

    def _experts(self, name: str, place: _Place, rows: Dimension, width: int) -> FloatExperts:
        units = T.arg(name, T.buffer((rows, width), "float32"))
        return FloatExperts(self.isa, int(self.x.shape[1]), width, place, self.x, units)
