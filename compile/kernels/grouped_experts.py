"""Experts with q8 and q4 weights: inputs and hidden units are quantised in groups of 32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from emberd.compile.isa.isa import Isa
from emberd.compile.isa.math import silu
from emberd.compile.isa.vector import Buffer, Expr, for_block, load
from emberd.compile.kernels.activations import Activations
from emberd.compile.kernels.dimensions import Dimension, Scratch
from emberd.compile.kernels.dot import RowMap, Weights, float_row
from emberd.compile.kernels.experts import Expect, Put
from emberd.compile.quantize.activations import Precision
from emberd.compile.quantize.formats import GROUP, TILE, GroupFormat
from tvm.script import tirx as T  # noqa: N812

_DOWN_TILES = 16  # of one task: weights that stay in cache while blocks of rows pass
_TILES = GROUP // TILE  # with the gate rows of the hidden units of one task, and with the up rows

Tile = tuple[Weights, Expr]
"""A matrix, and which of its tiles."""


class _Place(Protocol):
    """Where the weights of experts lie."""

    def gate_up(self, slot: Expr, task: Expr) -> tuple[list[Tile], list[Tile]]:
        """The tiles with the gate and the up rows of hidden units 32 * task and on."""

    def down(self, slot: Expr) -> Weights: ...


@dataclass(frozen=True)
class _Bank:
    """As `pack_expert` lays out the blob of a slot: 32 gate rows, then their up rows."""

    format: GroupFormat
    hidden: int
    intermediate: int
    bank: Buffer

    def gate_up(self, slot: Expr, task: Expr) -> tuple[list[Tile], list[Tile]]:
        weights = Weights(self.format, self.hidden, self.bank, (slot,))
        tiles = [(weights, task * (2 * _TILES) + i) for i in range(2 * _TILES)]
        return tiles[:_TILES], tiles[_TILES:]

    def down(self, slot: Expr) -> Weights:
        offset = self.format.packed_bytes(2 * self.intermediate, self.hidden)
        return Weights(self.format, self.intermediate, self.bank, (slot,), offset)


@dataclass(frozen=True)
class _Matrices:
    """Three weights of the layer, of one expert: there is no slot."""

    gate: Weights
    up: Weights
    down_weights: Weights

    def gate_up(self, _slot: Expr, task: Expr) -> tuple[list[Tile], list[Tile]]:
        gate, up = (
            [(weights, task * _TILES + i) for i in range(_TILES)]
            for weights in (self.gate, self.up)
        )
        return gate, up

    def down(self, _slot: Expr) -> Weights:
        return self.down_weights


@dataclass(frozen=True)
class GroupedExperts:
    """See `Experts`."""

    isa: Isa
    hidden: int
    intermediate: int
    place: _Place
    inputs: Activations
    units: Activations

    @property
    def hidden_tasks(self) -> int:
        return self.intermediate // GROUP

    @property
    def output_tasks(self) -> int:
        return -(-self.hidden // (_DOWN_TILES * TILE))

    def compute_hidden(
        self, slot: Expr, task: Expr, source: RowMap, target: RowMap, count: Expr | int
    ) -> None:
        gates, ups = (
            [weights.dot_tile(self.isa, tile, self.inputs, source, count) for weights, tile in half]
            for half in self.place.gate_up(slot, task)
        )
        lanes = self.isa.lanes
        with T.serial(0, count) as row:
            units = [
                T.Bind(
                    silu(load(gate, [row * TILE + lane], lanes))
                    * load(up, [row * TILE + lane], lanes)
                )
                for gate, up in zip(gates, ups, strict=True)
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
        weights = self.place.down(slot)

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
class GroupedInput:
    """See `ExpertInput`."""

    isa: Isa
    format: GroupFormat
    precision: Precision
    x: Buffer
    inputs: Activations

    @staticmethod
    def create(
        isa: Isa, weight_format: GroupFormat, precision: Precision, x: Buffer
    ) -> GroupedInput:
        tokens, hidden = x.shape[0], int(x.shape[1])
        zero_point = weight_format.zero_point
        inputs = Activations.arguments("x", tokens, hidden, precision, zero_point)
        return GroupedInput(isa, weight_format, precision, x, inputs)

    @staticmethod
    def scratch(precision: Precision, tokens: int, hidden: int) -> Scratch:
        return Activations.scratch(tokens, hidden, precision)

    @staticmethod
    def units_scratch(precision: Precision, rows: int, width: int) -> Scratch:
        return Activations.scratch(rows, width, precision)

    def prepare(self, row: Expr) -> None:
        self.inputs.store_row(self.isa, float_row(self.x, row), row)

    def routed(self, bank: Buffer, rows: Dimension, width: int) -> GroupedExperts:
        hidden = int(self.x.shape[1])
        return self._experts("units", _Bank(self.format, hidden, width, bank), rows, width)

    def shared(
        self, gate: Buffer, up: Buffer, down: Buffer, rows: Dimension, width: int
    ) -> GroupedExperts:
        hidden = int(self.x.shape[1])
        place = _Matrices(
            Weights(self.format, hidden, gate),
            Weights(self.format, hidden, up),
            Weights(self.format, width, down),
        )
        return self._experts("shared_units", place, rows, width)

    def _experts(self, name: str, place: _Place, rows: Dimension, width: int) -> GroupedExperts:
        units = Activations.arguments(name, rows, width, self.precision, self.format.zero_point)
        hidden = int(self.x.shape[1])
        return GroupedExperts(self.isa, hidden, width, place, self.inputs, units)
