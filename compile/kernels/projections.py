"""Several linear layers of the same input in one launch: the query, key and value of attention."""

from __future__ import annotations

from collections.abc import Sequence
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
from emberd.compile.kernels.dot import Weights, dot_float_block, float_blocks, over_weights
from emberd.compile.kernels.linear import multiply_tasks, quantise_rows, weight_argument
from emberd.compile.quantize.activations import Precision
from emberd.compile.quantize.formats import FORMATS, GroupFormat
from tvm.script import tirx as T  # noqa: N812


class Projection(NamedTuple):
    """One of the layers: format and rows of its weight, precision of the activations."""

    format: str
    activations: Precision
    n: int


def projections(
    isa: Isa, *, layers: tuple[Projection, ...], k: int, tokens: int | None
) -> PrimFunc:
    """x f32[T,k], a weight for each layer -> y f32[T,n] of each layer; scratch.

    Every y is what `linear` computes, bit for bit. x is quantised once for all the layers that take
    it in the same way. A layer of few rows costs no launch and no cold stream of its own.
    EmberdError when a format cannot take its dimensions.
    """
    names = [f"{types_suffix(layer.format, layer.activations)}_n{layer.n}" for layer in layers]
    with kernel(f"projections_{'_'.join(names)}_k{k}_{token_suffix(tokens)}") as builder:
        rows = dimension("tokens", tokens)
        x = T.arg("x", T.buffer((rows, k), "float32"))
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
        with T.sblock("root"):
            quantise_rows(isa, x, list(quantised.values()), tokens)
            tasks = [
                _float_tasks(isa, weight, x, y)
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


def projections_scratch(tokens: int, *, layers: tuple[Projection, ...], k: int) -> Scratch:
    """The quantised x, in each way that layers take it."""
    scratch: Scratch = []
    for precision, _zero_point in _inputs(layers):
        scratch += Activations.scratch(tokens, k, precision)
    return scratch


def _inputs(layers: Sequence[Projection]) -> list[tuple[Precision, int]]:
    """Precision and zero point of each way in which x is quantised."""
    found: dict[tuple[Precision, int], None] = {}
    for layer in layers:
        packing = FORMATS[layer.format]
        if isinstance(packing, GroupFormat):
            found[layer.activations, packing.zero_point] = None
    return list(found)


def _float_tasks(isa: Isa, weight: Buffer, x: Buffer, y: Buffer) -> Tasks:
    def multiply(block: Expr) -> None:
        dot_float_block(isa, weight, x, block, lambda value, at: store(y, value, at))

    return float_blocks(weight, x.shape[0]), multiply
