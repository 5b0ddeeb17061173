"""One expert of a mixture, for a block of token rows: act(gate) * up, then down.

Two classes of one face, for grouped (q8, q4) and for f32 weights. Both read the expert's blob at a
slot of the bank, as `pack_expert` lays it out, and keep its hidden units in scratch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from emberd.compile.isa.isa import Isa
from emberd.compile.isa.math import silu
from emberd.compile.isa.vector import Buffer, Expr, for_block, load, store, vector_type
from emberd.compile.kernels.activations import Activations
from emberd.compile.kernels.dimensions import Dimension, Scratch
from emberd.compile.kernels.dot import RowMap, Weights, dot_float_rows
from emberd.compile.quantize.activations import Precision
from emberd.compile.quantize.formats import GROUP, TILE, Format, GroupFormat
from tvm.script import tirx as T  # noqa: N812

Put = Callable[[Expr, Expr, Expr], None]
"""(row of the block, first column, vector or scalar): takes outputs of the expert."""

Expect = Callable[[Expr, Expr], None]
"""(row of the block, first column): told where outputs will go before they are computed."""

_DOWN_TILES = 16  # of one task: weights that stay in cache while blocks of rows pass
_FLOAT_UNITS = 2  # hidden units computed together in f32: four weight rows
_FLOAT_OUTPUTS = 4  # outputs computed together in f32


class Experts(Protocol):
    """The experts of a layer. A block is `count` rows (at most ROWS), mapped by a RowMap."""

    @property
    def hidden(self) -> int:
        """Size of a row of x."""

    @property
    def intermediate(self) -> int:
        """Hidden units of an expert."""

    @property
    def hidden_tasks(self) -> int:
        """Parts that the hidden units of an expert are cut into."""

    @property
    def output_tasks(self) -> int:
        """Parts that the outputs of an expert are cut into."""

    def prepare(self, row: Expr) -> None:
        """Makes row `row` of x ready for `compute_hidden`."""

    def compute_hidden(
        self, slot: Expr, task: Expr, source: RowMap, target: RowMap, count: Expr | int
    ) -> None:
        """Part `task` of the hidden units: rows source of x -> rows target of the scratch."""

    def compute_output(
        self,
        slot: Expr,
        task: Expr,
        source: RowMap,
        count: Expr | int,
        put: Put,
        expect: Expect | None = None,
    ) -> None:
        """Part `task` of the outputs, from rows source of the hidden units."""


@dataclass(frozen=True)
class GroupedExperts:
    """q8 and q4: inputs and hidden units are quantised in groups of 32."""

    isa: Isa
    format: GroupFormat
    hidden: int
    intermediate: int
    bank: Buffer
    x: Buffer
    inputs: Activations
    units: Activations

    @staticmethod
    def create(
        isa: Isa,
        weight_format: GroupFormat,
        precision: Precision,
        x: Buffer,
        bank: Buffer,
        rows: Dimension,
        width: int,
    ) -> GroupedExperts:
        """Declares the scratch arguments; `rows` hidden rows of `width` units."""
        tokens, hidden, zero_point = x.shape[0], int(x.shape[1]), weight_format.zero_point
        return GroupedExperts(
            isa=isa,
            format=weight_format,
            hidden=hidden,
            intermediate=width,
            bank=bank,
            x=x,
            inputs=Activations.arguments("x", tokens, hidden, precision, zero_point),
            units=Activations.arguments("units", rows, width, precision, zero_point),
        )

    @staticmethod
    def scratch(precision: Precision, tokens: int, rows: int, hidden: int, width: int) -> Scratch:
        inputs = Activations.scratch(tokens, hidden, precision)
        return inputs + Activations.scratch(rows, width, precision)

    @property
    def hidden_tasks(self) -> int:
        return self.intermediate // GROUP

    @property
    def output_tasks(self) -> int:
        return -(-self.hidden // (_DOWN_TILES * TILE))

    def prepare(self, row: Expr) -> None:
        self.inputs.store_row(self.isa, self.x, row, row)

    def compute_hidden(
        self, slot: Expr, task: Expr, source: RowMap, target: RowMap, count: Expr | int
    ) -> None:
        weights = Weights(self.format, self.hidden, self.bank, prefix=(slot,))
        per_task = 2 * GROUP // TILE
        gate_0, gate_1, up_0, up_1 = (
            weights.dot_tile(self.isa, task * per_task + i, self.inputs, source, count)
            for i in range(per_task)
        )
        lanes = self.isa.lanes
        with T.serial(0, count) as row:
            units = [
                T.Bind(
                    silu(load(gate, [row * TILE + lane], lanes))
                    * load(up, [row * TILE + lane], lanes)
                )
                for gate, up in ((gate_0, up_0), (gate_1, up_1))
                for lane in range(0, TILE, lanes)
            ]
            self.units.store_group(units, target(row), task)

    def compute_output(
        self,
        slot: Expr,
        task: Expr,
        source: RowMap,
        count: Expr | int,
        put: Put,
        expect: Expect | None = None,
    ) -> None:
        offset = self.format.packed_bytes(2 * self.intermediate, self.hidden)
        weights = Weights(self.format, self.intermediate, self.bank, (slot,), offset)

        def compute(tiles: int) -> None:
            with T.serial(0, tiles) as i:
                tile = T.Bind(task * _DOWN_TILES + i)
                if expect is not None:
                    with T.serial(0, count) as row:
                        expect(row, tile * TILE)
                sums = weights.dot_tile(self.isa, tile, self.units, source, count)
                with T.serial(0, count) as row:
                    for lane in range(0, TILE, self.isa.lanes):
                        value = load(sums, [row * TILE + lane], self.isa.lanes)
                        put(row, tile * TILE + lane, value)

        for_block(task, self.hidden // TILE, _DOWN_TILES, compute)


@dataclass(frozen=True)
class FloatExperts:
    """f32 weights of any dimension."""

    isa: Isa
    hidden: int
    intermediate: int
    bank: Buffer
    x: Buffer
    units: Buffer  # float32 [rows, intermediate]

    @staticmethod
    def create(isa: Isa, x: Buffer, bank: Buffer, rows: Dimension, width: int) -> FloatExperts:
        """Declares the scratch argument; `rows` hidden rows of `width` units."""
        units = T.arg("units", T.buffer((rows, width), "float32"))
        return FloatExperts(isa, int(x.shape[1]), width, bank, x, units)

    @staticmethod
    def scratch(rows: int, width: int) -> Scratch:
        return [("float32", (rows, width))]

    @property
    def hidden_tasks(self) -> int:
        return -(-self.intermediate // _FLOAT_UNITS)

    @property
    def output_tasks(self) -> int:
        return -(-self.hidden // _FLOAT_OUTPUTS)

    def prepare(self, row: Expr) -> None:
        """x is used as it is."""

    def compute_hidden(
        self, slot: Expr, task: Expr, source: RowMap, target: RowMap, count: Expr | int
    ) -> None:
        def weight(unit: Expr, column: Expr, lanes: int) -> Expr:
            return self._load(slot, T.Cast("int64", unit) * self.hidden + column, lanes)

        def compute(units: int) -> None:
            first = T.Bind(task * _FLOAT_UNITS)
            rows = [first + i for i in range(units)]
            rows += [first + self.intermediate + i for i in range(units)]
            with T.serial(0, count) as row:
                (sums,) = dot_float_rows(self.isa, weight, rows, self.x, [T.Bind(source(row))])
                for i, (gate, up) in enumerate(zip(sums[:units], sums[units:], strict=True)):
                    store(self.units, silu(gate) * up, [target(row), first + i])

        for_block(task, self.intermediate, _FLOAT_UNITS, compute)

    def compute_output(
        self,
        slot: Expr,
        task: Expr,
        source: RowMap,
        count: Expr | int,
        put: Put,
        expect: Expect | None = None,
    ) -> None:
        start = 2 * self.intermediate * self.hidden

        def weight(output: Expr, unit: Expr, lanes: int) -> Expr:
            return self._load(
                slot, T.Cast("int64", output) * self.intermediate + unit + start, lanes
            )

        def compute(outputs: int) -> None:
            rows = [T.Bind(task * _FLOAT_OUTPUTS + i) for i in range(outputs)]
            with T.serial(0, count) as row:
                (sums,) = dot_float_rows(self.isa, weight, rows, self.units, [T.Bind(source(row))])
                for output, value in zip(rows, sums, strict=True):
                    put(row, output, value)

        for_block(task, self.hidden, _FLOAT_OUTPUTS, compute)

    def _load(self, slot: Expr, number: Expr, lanes: int) -> Expr:
        """Consecutive floats of the expert at `slot`, whose blob is bytes to the bank."""
        values = load(self.bank, [slot, number * 4], 4 * lanes)
        return T.Bind(T.reinterpret(vector_type("float32", lanes), values))


def declare_experts(
    isa: Isa,
    weight_format: Format,
    precision: Precision,
    x: Buffer,
    bank: Buffer,
    rows: Dimension,
    width: int,
) -> Experts:
    """The experts of a format, with their scratch arguments declared in the current PrimFunc."""
    if isinstance(weight_format, GroupFormat):
        return GroupedExperts.create(isa, weight_format, precision, x, bank, rows, width)
    return FloatExperts.create(isa, x, bank, rows, width)


def experts_scratch(
    weight_format: Format, precision: Precision, tokens: int, rows: int, hidden: int, width: int
) -> Scratch:
    """What `declare_experts` declares."""
    if isinstance(weight_format, GroupFormat):
        return GroupedExperts.scratch(precision, tokens, rows, hidden, width)
    return FloatExperts.scratch(rows, width)
