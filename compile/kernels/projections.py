"""Linear layers of one input, and its norm, in one launch: query, key and value of attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from emberd.compile.isa.isa import Isa
from emberd.compile.isa.vector import Buffer, Expr, PrimFunc, kernel, store
from emberd.compile.kernels.activations import Activations, types_suffix
from emberd.compile.kernels.dimensions import (
    Scratch,
    Tasks,
    dimension,
    dispatch,
    token_suffix,
)
from emberd.compile.kernels.dot import (
    FloatRow,
    Weights,
    dot_float_block,
    float_blocks,
    float_row,
    over_weights,
)
from emberd.compile.kernels.linear import multiply_tasks, quantise_rows, weight_argument
from emberd.compile.kernels.rms_norm import Norm, normed_row
from emberd.compile.quantize.activations import Precision
from emberd.compile.quantize.formats import FORMATS, GroupFormat
from tvm.script import tirx as T  # noqa: N812


class Projection(NamedTuple):
    """One of the layers: format and rows of its weight, precision of the activations."""

    format: str
    activations: Precision
    n: int


def projections(
    isa: Isa,
    *,
    layers: tuple[Projection, ...],
    k: int,
    tokens: int | None,
    norm: Norm | None = None,
) -> PrimFunc:
    """x f32[T,k], (norm f32[k],) a weight for each layer -> y f32[T,n] of each layer; scratch.

    Every y is what `linear` computes, bit for bit, with `norm` of what `rms_norm` does. x is
    quantised once for all the layers that take it in the same way. A layer of few rows costs no
    launch and no cold stream of its own. EmberdError when a format cannot take its dimensions.

    With `norm`, one of the layers at least must be quantised: others do without a prologue.
    """
    names = [f"{types_suffix(layer.format, layer.activations)}_n{layer.n}" for layer in layers]
    names += [] if norm is None else ["normed", norm.suffix()]
    with kernel(f"projections_{'_'.join(names)}_k{k}_{token_suffix(tokens)}") as builder:
        rows = dimension("tokens", tokens)
        x = T.arg("x", T.buffer((rows, k), "float32"))
        norm_weight = None if norm is None else T.arg("norm", T.buffer((k,), "float32"))
        weights = [
            weight_argument(f"weight_{i}", layer.format, layer.n, k)
            for i, layer in enumerate(layers)
        ]
        outputs = [
            T.arg(f"y_{i}", T.buffer((rows, layer.n), "float32")) for i, layer in enumerate(layers)
        ]
        quantised = {
            (precision, zero_point): Activations.arguments(
                f"x_{precision}_{zero_point}", rows, k, precision, zero_point
            )
            for precision, zero_point in _inputs(layers)
        }
        source, floats = partial(float_row, x), x
        if norm is not None:
            source = partial(normed_row, isa, x, norm_weight, norm=norm)
            if _has_floats(layers):
                floats = T.arg("normed", T.buffer((rows, k), "float32"))
                source = partial(_stored, isa, source, floats)
        with T.sblock("root"):
            quantise_rows(isa, source, rows, list(quantised.values()))
            tasks = [
                _float_tasks(isa, weight, floats, y)
                if not isinstance(packing := FORMATS[layer.format], GroupFormat)
                else multiply_tasks(
                    isa,
                    Weights(packing, k, weight),
                    quantised[layer.activations, packing.zero_point],
                    None,
                    y,
                )
                for layer, weight, y in zip(layers, weights, outputs, strict=True)
            ]
            count = sum(number for number, _body in tasks)
            elements = sum(layer.n for layer in layers) * k // count
            with over_weights(count, elements, rows) as task:
                dispatch(task, tasks)
    return builder.get()


def projections_scratch(
    tokens: int, *, layers: tuple[Projection, ...], k: int, norm: Norm | None = None
) -> Scratch:
    """The quantised x, in each way that layers take it; in float32 what a norm makes of x."""
    scratch: Scratch = []
    for precision, _zero_point in _inputs(layers):
        scratch += Activations.scratch(tokens, k, precision)
    if norm is not None and _has_floats(layers):
        scratch.append(("float32", (tokens, k)))
    return scratch


def _inputs(layers: Sequence[Projection]) -> list[tuple[Precision, int]]:
    """Precision and zero point of each way in which x is quantised."""
    found: dict[tuple[Precision, int], None] = {}
    for layer in layers:
        packing = FORMATS[layer.format]
        if isinstance(packing, GroupFormat):
            found[layer.activations, packing.zero_point] = None
    return list(found)


def _has_floats(layers: Sequence[Projection]) -> bool:
    return any(not isinstance(FORMATS[layer.format], GroupFormat) for layer in layers)


def _stored(isa: Isa, source: Callable[[Expr], FloatRow], target: Buffer, row: Expr) -> FloatRow:
    """Row `row` of the source, once it is written to the target."""
    values = source(row)
    with T.serial(0, int(target.shape[1]) // isa.lanes) as vector:
        column = vector * isa.lanes
        store(target, values(column, isa.lanes), [row, column])
    return float_row(target, row)


def _float_tasks(isa: Isa, weight: Buffer, x: Buffer, y: Buffer) -> Tasks:
    def multiply(block: Expr) -> None:
        dot_float_block(isa, weight, x, block, lambda value, at: store(y, value, at))

    return float_blocks(weight, x.shape[0]), multiply
