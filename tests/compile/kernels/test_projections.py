"""projections: as `linear` and `rms_norm` compute them alone, bit for bit, on every ISA."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from emberd.compile.isa.isa import Isa
from emberd.compile.kernels import rms_norm
from emberd.compile.kernels.dimensions import Scratch
from emberd.compile.kernels.linear import linear, linear_scratch, reference
from emberd.compile.kernels.projections import Projection, projections, projections_scratch
from emberd.compile.kernels.rms_norm import Norm
from emberd.compile.quantize.activations import quantise_reference
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
NORMED = {
    "mixed": (LAYERS["mixed"], 96, Norm(1e-6, True)),
    "precisions": (
        (Projection("q8", "int16", 7), Projection("q4", "int8", 16)),
        160,
        Norm(1e-5, False),
    ),
    "single": ((Projection("q8", "int8", 21),), 256, Norm(1e-6, True)),
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


class Normed:
    """Layers behind a norm, as one kernel and as two, on random inputs."""

    def __init__(self, name: str, isa: Isa, harness: Any) -> None:
        self.layers, self.k, self.norm = NORMED[name]
        self._harness = harness
        static: dict[str, Any] = {"layers": self.layers, "k": self.k}
        self._functions = {
            "norm": rms_norm.rms_norm(
                isa, columns=self.k, **self.norm._asdict(), gated=False, rows=None
            ),
            "layers": projections(isa, **static, tokens=None),
            "both": projections(isa, **static, tokens=None, norm=self.norm),
            "both for one token": projections(isa, **static, tokens=1, norm=self.norm),
        }
        self._library = harness.library(isa, list(self._functions.values()))
        random = np.random.default_rng(self.k)
        self.x = (random.standard_normal((TOKENS, self.k)) * 3).astype(np.float32)
        self.x[4] = 0
        self.weight = harness.aligned(random.standard_normal(self.k).astype(np.float32))
        self.matrices, self._packed = [], []
        for layer in self.layers:
            matrix = random.standard_normal((layer.n, self.k)).astype(np.float32)
            packed = FORMATS[layer.format].pack(matrix)
            self.matrices.append(FORMATS[layer.format].unpack(packed, layer.n, self.k))
            self._packed.append(harness.aligned(matrix if layer.format == "f32" else packed))

    def in_one(self, rows: slice, kernel: str) -> list[np.ndarray]:
        x = self._harness.aligned(self.x[rows])
        scratch = projections_scratch(len(x), layers=self.layers, k=self.k, norm=self.norm)
        return self._outputs(kernel, [x, self.weight], scratch)

    def in_two(self) -> list[np.ndarray]:
        x = self._harness.empty(np.float32, self.x.shape)
        self._call("norm", self._harness.aligned(self.x), self.weight, x)
        scratch = projections_scratch(TOKENS, layers=self.layers, k=self.k)
        return self._outputs("layers", [x], scratch)

    def _outputs(self, kernel: str, inputs: list[np.ndarray], scratch: Scratch) -> list[np.ndarray]:
        outputs = [
            self._harness.empty(np.float32, (len(inputs[0]), layer.n)) for layer in self.layers
        ]
        self._call(kernel, *inputs, *self._packed, *outputs, *self._harness.scratch(scratch))
        return outputs

    def _call(self, kernel: str, *arguments: np.ndarray) -> None:
        self._library(str(self._functions[kernel].attrs["global_symbol"]), *arguments)


@pytest.fixture(scope="module", params=NORMED)
def normed(request: pytest.FixtureRequest, isa: Isa, harness: Any) -> Normed:
    return Normed(request.param, isa, harness)


def test_a_norm_gives_the_same_bits_within_the_kernel(normed: Normed) -> None:
    expected = normed.in_two()
    one = "both for one token"
    for rows, kernel in ((slice(None), "both"), (slice(3, 11), "both"), (slice(7, 8), one)):
        for y, of_all in zip(normed.in_one(rows, kernel), expected, strict=True):
            np.testing.assert_array_equal(y, of_all[rows])


def test_normed_layers_agree_with_the_references(normed: Normed) -> None:
    """But where a normed number lies between two integers: it may be rounded to the other one."""
    exact = rms_norm.reference(
        normed.x.astype(np.float64), normed.weight.astype(np.float64), **normed.norm._asdict()
    ).astype(np.float32)
    outputs = normed.in_one(slice(None), "both")
    for layer, matrix, y in zip(normed.layers, normed.matrices, outputs, strict=True):
        expected = reference(quantise_reference(exact, layer.activations), matrix)
        apart = np.abs(y - expected) / np.abs(expected).max()
        assert np.quantile(apart, 0.9) < 1e-5
        assert apart.max() < 0.02


def test_layers_that_take_the_same_input_share_it() -> None:
    shared, apart = LAYERS["grouped"], LAYERS["precisions"]
    single = linear_scratch(1, **shared[0]._asdict(), k=K)
    assert projections_scratch(1, layers=shared, k=K) == single
    assert len(projections_scratch(1, layers=apart, k=K)) == 2 * len(single)


def test_dimensions_that_a_format_cannot_take(isa: Isa) -> None:
    with pytest.raises(EmberdError, match="multiple of 32"):
        projections(isa, layers=LAYERS["mixed"], k=40, tokens=1)
