"""Dimensions of kernels: how many tokens, and how a dimension is cut into vectors and tasks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from emberd.compile.isa.isa import Isa
from emberd.compile.isa.vector import Expr
from tvm import tirx
from tvm.script import tirx as T  # noqa: N812

Dimension = Any
"""An int, or a TIR variable that takes its value from the tensor passed."""

Scratch = list[tuple[str, tuple[int, ...]]]
"""dtype and shape of each scratch tensor, in argument order."""

Tasks = tuple[int, Callable[[Expr], None]]
"""How many, and what emits the one of a number."""

_SMALL = 8192  # elements: one or two microseconds


def dimension(name: str, value: int | None = None) -> Dimension:
    """`value`, or a variable called `name` for a dimension that is known only at run time."""
    return tirx.Var(name, "int64") if value is None else value


def parallel_unless_small(tasks: Dimension, elements: int) -> Any:
    """A loop over tasks of `elements` each: parallel if that can outweigh waking the threads."""
    small = isinstance(tasks, int) and tasks * elements <= _SMALL
    return (T.serial if small else T.parallel)(0, tasks)


def dispatch(task: Expr, tasks: Sequence[Tasks]) -> None:
    """Emits the body that the number of a task belongs to."""
    (count, body), *others = tasks
    if not others:
        body(task)
        return
    with T.If(task < count):
        with T.Then():
            body(task)
        with T.Else():
            dispatch(T.Bind(task - count), others)


def token_suffix(tokens: int | None) -> str:
    """How a kernel's name tells the number of tokens it was built for."""
    return "tn" if tokens is None else f"t{tokens}"


def vector_lanes(isa: Isa, *dimensions: int) -> int:
    """Lanes of the widest vectors that tile all the dimensions exactly: no tail, no over-read."""
    return math.gcd(isa.lanes, *dimensions)


def block_size(dimension: int, limit: int = 1024) -> int:
    """The largest power of two up to `limit` (one itself) that divides a dimension."""
    return math.gcd(dimension, limit)
