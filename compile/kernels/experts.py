"""Experts for a block of token rows: act(gate) * up, then down.

What kernels do with them is the same for grouped (q8, q4) and for f32 weights, which are two
classes of one face; and for the experts of a bank, read at their slots, and for a shared expert.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from emberd.compile.isa.vector import Expr
from emberd.compile.kernels.dot import RowMap

Put = Callable[[Expr, Expr, Expr], None]
"""(row of the block, first column, vector or scalar): takes outputs of the expert."""

Expect = Callable[[Expr, Expr], None]
"""(row of the block, first column): told where outputs will go before they are computed."""


class Experts(Protocol):
    """A block is `count` rows (at most ROWS), mapped by a RowMap; hidden units are in scratch.

    A shared expert has no slot: None stands for it.
    """

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
