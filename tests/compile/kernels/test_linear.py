"""linear: every format against numpy on the unpacked weights, on every ISA of this machine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from emberd.compile.isa.isa import Isa
from emberd.compile.kernels.linear import linear, linear_scratch, reference
from emberd.compile.quantize.activations import (
    PLANE_RATIO,
    Precision,
    quantise_activations,
    quantise_reference,
)
from emberd.compile.quantize.formats import FORMATS
from emberd.daemon.errors import EmberdError
from random_shapes import odd, random_shapes

Case = tuple[str, Precision, int, int, bool]
CASES: list[Case] = [  # format, activations, n, k, residual
    ("f32", "float32", 24, 48, False),
    ("f32", "float32", 1, 100, False),
    ("f32", "float32", 3, 7, True),
    ("f32", "float32", 33, 130, True),
    ("q8", "int8", 37, 96, True),
    ("q8", "int8", 80, 160, False),
    ("q8", "int16", 80, 160, True),
    ("q4", "int8", 7, 32, False),
    ("q4", "int8", 37, 96, False),
    ("q4", "int8", 80, 160, True),
    ("q4", "int16", 7, 32, True),
    ("q4", "int16", 37, 96, False),
]
CASES += random_shapes(
    "linear",
    lambda r: ("q4", r.choice(["int8", "int16"]), odd(r, 1, 99), 32 * r.randint(1, 9), True),
)
CASES += random_shapes(
    "linear in float32", lambda r: ("f32", "float32", odd(r, 1, 50), odd(r, 1, 200), False)
)
INT16 = [case for case in CASES if case[1] == "int16"]
LOUD: list[Case] = [("q4", "int8", 37, 96, False), ("q4", "int16", 37, 96, False)]
TOKENS = 21  # two blocks of 8 and a rest
IDS = [f"{case[0]}-{case[1]}-{case[2]}x{case[3]}{'-residual' * case[4]}" for case in CASES]


@pytest.fixture(scope="module")
def library(isa: Isa, harness: Any) -> Any:
    return harness.library(
        isa,
        [
            linear(
                isa,
                format=name,
                activations=activations,
                n=n,
                k=k,
                residual=residual,
                tokens=tokens,
            )
            for name, activations, n, k, residual in CASES
            for tokens in (1, None)
        ],
    )


class Problem:
    """Random inputs of one case, and the kernel's result on their first rows."""

    def __init__(self, case: Case, harness: Any, library: Any) -> None:
        self.format, self.activations, self.n, self.k, has_residual = case
        random = np.random.default_rng(self.n)
        weight = random.standard_normal((self.n, self.k)).astype(np.float32)
        self.x = random.standard_normal((TOKENS, self.k)).astype(np.float32)
        self.residual = None
        if has_residual:
            self.residual = random.standard_normal((TOKENS, self.n)).astype(np.float32)
        packed = FORMATS[self.format].pack(weight)
        self.weight = FORMATS[self.format].unpack(packed, self.n, self.k)
        self.packed = harness.aligned(self.weight if self.format == "f32" else packed)
        self._harness, self._library = harness, library

    def run(self, rows: slice, suffix: str) -> np.ndarray:
        """The kernel's y for some rows of x."""
        x = self._harness.aligned(self.x[rows])
        y: np.ndarray = self._harness.empty(np.float32, (len(x), self.n))
        residual = [] if self.residual is None else [self._harness.aligned(self.residual[rows])]
        scratch = linear_scratch(
            len(x), format=self.format, activations=self.activations, n=self.n, k=self.k
        )
        self.scratch = self._harness.scratch(scratch)
        types = self.format + {"int8": "a8", "int16": "a16", "float32": ""}[self.activations]
        name = f"linear{'_residual' * len(residual)}_{types}_n{self.n}_k{self.k}_{suffix}"
        self._library(name, x, self.packed, *residual, y, *self.scratch)
        return y

    def reference(self, activations: Precision) -> np.ndarray:
        return reference(quantise_reference(self.x, activations), self.weight, self.residual)


@pytest.fixture(params=CASES, ids=IDS)
def problem(request: pytest.FixtureRequest, harness: Any, library: Any) -> Problem:
    return Problem(request.param, harness, library)


def test_agrees_with_reference(problem: Problem) -> None:
    y = problem.run(slice(None), "tn")
    expected = problem.reference(problem.activations)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


def test_quantised_activations_cost_little(problem: Problem) -> None:
    exact = problem.reference("float32")
    error = np.linalg.norm(problem.run(slice(None), "tn") - exact) / np.linalg.norm(exact)
    assert error < {"int8": 0.01, "int16": 4e-5, "float32": 1e-6}[problem.activations]


@pytest.mark.parametrize("case", INT16, ids=lambda case: f"{case[0]}-{case[2]}x{case[3]}")
def test_int16_planes_are_those_of_the_reference_bit_for_bit(
    case: Case, harness: Any, library: Any
) -> None:
    problem = Problem(case, harness, library)
    problem.run(slice(None), "tn")
    scales, biases, values = problem.scratch
    integers, expected_scales = quantise_activations(problem.x, "int16")
    np.testing.assert_array_equal(scales, expected_scales)
    groups = values[:, : 2 * problem.k].reshape(TOKENS, -1, 2, 32)
    for plane, expected in enumerate(integers):
        np.testing.assert_array_equal(groups[:, :, plane].reshape(TOKENS, -1), expected)
    sums = (PLANE_RATIO * integers[0] + integers[1]).reshape(*scales.shape, 32).sum(-1)
    np.testing.assert_array_equal(biases, -FORMATS[problem.format].zero_point * sums)


def test_rows_do_not_depend_on_the_number_of_tokens(problem: Problem) -> None:
    many = problem.run(slice(None), "tn")
    for row in (0, 7, 8, TOKENS - 1):
        rows = slice(row, row + 1)
        np.testing.assert_array_equal(problem.run(rows, "t1"), many[rows])
    np.testing.assert_array_equal(problem.run(slice(5, 18), "tn"), many[5:18])


@pytest.mark.parametrize("case", LOUD, ids=lambda case: case[1])
def test_silent_and_loud_activations(case: Case, harness: Any, library: Any) -> None:
    """Groups of zeros and of denormals count as zero; large ones do not overflow."""
    problem = Problem(case, harness, library)
    problem.x[:, :32] = 0
    problem.x[:, 32:64] = 1e-40
    problem.x[:, 64:] *= 1e30
    y = problem.run(slice(None), "tn")
    expected = problem.reference(problem.activations)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


def test_dimensions_that_the_format_cannot_take(isa: Isa) -> None:
    with pytest.raises(EmberdError, match="multiple of 32"):
        linear(isa, format="q4", activations="int8", n=16, k=40, residual=False, tokens=1)


@pytest.mark.parametrize(("tokens", "asks"), [(1, False), (None, True)])
def test_a_single_token_asks_for_no_weights_ahead(isa: Isa, tokens: int | None, asks: bool) -> None:
    """One stream is followed best by the hardware alone: 19 GB/s with requests, 23 without."""
    function = linear(
        isa, format="q4", activations="int16", n=64, k=64, residual=False, tokens=tokens
    )
    assert ("prefetch" in function.script()) is asks
