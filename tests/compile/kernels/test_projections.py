"""projections: every layer as `linear` computes it alone, bit for bit, on every ISA."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from emberd.compile.isa.isa import Isa
from emberd.compile.kernels.linear import linear, linear_scratch
from emberd.compile.kernels.projections import Projection, projections, projections_scratch
from emberd.compile.quantize.formats import FORMATS
from emberd.daemon.errors import EmberdError

K = 96
TOKENS = 19
LAYERS = {
    "grouped": (Projection("q4", "int16", 37), Projection("q4", "int16", 64)),
    "mixed": (
        Projection("q4", "int16", 80),
        Projection("f32", "float32", 3),
        Projection("q8", "int16", 16),
        Projection("f32", "float32", 33),
    ),
    "precisions": (Projection("q4", "int8", 16), Projection("q4", "int16", 16)),
    "float": (Projection("f32", "float32", 5), Projection("f32", "float32", 1)),
}


def _symbol(layers: tuple[Projection, ...], suffix: str) -> str:
    names = "_".join(f"{_types(layer)}_n{layer.n}" for layer in layers)
    return f"projections_{names}_k{K}_{suffix}"


def _types(layer: Projection) -> str:
    return layer.format + {"int8": "a8", "int16": "a16", "float32": ""}[layer.activations]


@pytest.fixture(scope="module")
def library(isa: Isa, harness: Any) -> Any:
    together = [
        projections(isa, layers=layers, k=K, tokens=tokens)
        for layers in LAYERS.values()
        for tokens in (1, None)
    ]
    alone = [
        linear(isa, **layer._asdict(), k=K, residual=False, tokens=None)
        for layer in {layer for layers in LAYERS.values() for layer in layers}
    ]
    return harness.library(isa, [*together, *alone])


@pytest.mark.parametrize("name", LAYERS)
def test_each_layer_is_the_linear_layer_of_its_own(harness: Any, library: Any, name: str) -> None:
    layers = LAYERS[name]
    random = np.random.default_rng(len(name))
    x = random.standard_normal((TOKENS, K)).astype(np.float32)
    weights = []
    for layer in layers:
        weight = random.standard_normal((layer.n, K)).astype(np.float32)
        weights.append(
            harness.aligned(weight if layer.format == "f32" else FORMATS[layer.format].pack(weight))
        )
    expected = []
    for layer, weight in zip(layers, weights, strict=True):
        y = harness.empty(np.float32, (TOKENS, layer.n))
        scratch = harness.scratch(linear_scratch(TOKENS, **layer._asdict(), k=K))
        library(
            f"linear_{_types(layer)}_n{layer.n}_k{K}_tn", harness.aligned(x), weight, y, *scratch
        )
        expected.append(y)
    for rows, suffix in ((slice(None), "tn"), (slice(3, 11), "tn"), (slice(7, 8), "t1")):
        count = len(x[rows])
        outputs = [harness.empty(np.float32, (count, layer.n)) for layer in layers]
        scratch = harness.scratch(projections_scratch(count, layers=layers, k=K))
        library(_symbol(layers, suffix), harness.aligned(x[rows]), *weights, *outputs, *scratch)
        for y, of_all in zip(outputs, expected, strict=True):
            np.testing.assert_array_equal(y, of_all[rows])


def test_layers_that_take_the_same_input_share_it() -> None:
    shared, apart = LAYERS["grouped"], LAYERS["precisions"]
    single = linear_scratch(1, **shared[0]._asdict(), k=K)
    assert projections_scratch(1, layers=shared, k=K) == single
    assert len(projections_scratch(1, layers=apart, k=K)) == 2 * len(single)


def test_dimensions_that_a_format_cannot_take(isa: Isa) -> None:
    with pytest.raises(EmberdError, match="multiple of 32"):
        projections(isa, layers=LAYERS["mixed"], k=40, tokens=1)
