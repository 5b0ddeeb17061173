"""moe: every format against numpy on the unpacked experts, on every ISA of this machine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from emberd.compile.isa.isa import Isa
from emberd.compile.kernels.moe import moe
from emberd.compile.quantize.activations import PLANE_RATIO
from emberd.daemon.errors import EmberdError
from mixtures import CASES, TOKENS, Mixture, case_name, mixture_library, row_errors


@pytest.fixture(scope="module")
def library(isa: Isa, harness: Any) -> Any:
    return mixture_library(isa, harness)


@pytest.fixture(params=CASES, ids=case_name)
def mixture(request: pytest.FixtureRequest, harness: Any, library: Any) -> Mixture:
    return Mixture(request.param, harness, library)


def test_agrees_with_reference(mixture: Mixture) -> None:
    errors = row_errors(mixture.many(), mixture.reference(mixture.activations))
    # A hidden unit on the edge between two integers may fall to the other side: a step of one unit,
    # in few of the rows.
    step = {"int8": 5e-3, "int16": 5e-3 / PLANE_RATIO, "float32": 0}[mixture.activations]
    assert np.quantile(errors, 0.8) < 1e-5
    assert errors.max() < step + 1e-6


def test_quantised_activations_cost_little(mixture: Mixture) -> None:
    """Two matrices in a row: twice the percent of one."""
    errors = row_errors(mixture.many(), mixture.reference("float32"))
    assert np.median(errors) < {"int8": 0.02, "int16": 8e-5, "float32": 1e-6}[mixture.activations]


def test_rows_do_not_depend_on_the_number_of_tokens(mixture: Mixture) -> None:
    many = mixture.many()
    for row in (0, 20, TOKENS - 1):
        np.testing.assert_array_equal(mixture.one(row), many[row : row + 1])
    np.testing.assert_array_equal(mixture.many(slice(9, 31)), many[9:31])


def test_all_tokens_choose_the_same_expert(mixture: Mixture) -> None:
    mixture.ids[:] = mixture.experts - 1
    many = mixture.many()
    np.testing.assert_array_equal(mixture.one(3), many[3:4])
    assert row_errors(many, mixture.reference(mixture.activations)).max() < 5e-3


def test_dimensions_that_the_format_cannot_take(isa: Isa) -> None:
    with pytest.raises(EmberdError, match="multiple of 32"):
        moe(
            isa,
            format="q4",
            activations="int8",
            hidden=64,
            intermediate=40,
            experts=4,
            top_k=2,
            shared=32,
        )
