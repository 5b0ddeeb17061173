"""Split: the columns of a matrix become several matrices, as of a query and its gate."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from emberd.compile.isa.isa import Isa
from emberd.compile.isa.vector import PrimFunc, kernel, load, store
from emberd.compile.kernels.dimensions import (
    dimension,
    parallel_unless_small,
    token_suffix,
    vector_lanes,
)
from numpy.typing import NDArray
from tvm.script import tirx as T  # noqa: N812


def reference(x: NDArray[np.float32], *, widths: Sequence[int]) -> list[NDArray[np.float32]]:
    """x [R, sum(widths)] -> y_i [R, widths[i]]."""
    return np.split(x, list(accumulate(widths))[:-1], axis=1)


def split(isa: Isa, *, widths: tuple[int, ...], rows: int | None) -> PrimFunc:
    """x f32[R, sum(widths)] -> y_i f32[R, widths[i]]."""
    lanes = vector_lanes(isa, *widths)
    named = "_".join(f"n{width}" for width in widths)
    with kernel(f"split_{named}_{token_suffix(rows)}") as builder:
        count = dimension("rows", rows)
        x = T.arg("x", T.buffer((count, sum(widths)), "float32"))
        parts = [
            T.arg(f"y{i}", T.buffer((count, width), "float32")) for i, width in enumerate(widths)
        ]
        with T.sblock("root"), parallel_unless_small(count, sum(widths)) as row:
            first = 0
            for part, width in zip(parts, widths, strict=True):
                with T.serial(0, width // lanes) as vector:
                    store(
                        part, load(x, [row, first + vector * lanes], lanes), [row, vector * lanes]
                    )
                first += width
    return builder.get()
