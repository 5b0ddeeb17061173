"""shared_expert: every format against numpy, on every ISA of this machine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from emberd.compile.isa.isa import Isa
from emberd.compile.quantize.activations import PLANE_RATIO
from mixtures import SHARED_CASES, Mixture, case_name, mixture_library, row_errors


@pytest.fixture(scope="module")
def library(isa: Isa, harness: Any) -> Any:
    return mixture_library(isa, harness)


@pytest.fixture(params=SHARED_CASES, ids=case_name)
def mixture(request: pytest.FixtureRequest, harness: Any, library: Any) -> Mixture:
    return Mixture(request.param, harness, library)


def test_agrees_with_reference(mixture: Mixture) -> None:
    scales, y = mixture.shared_expert()
    expected_scales, expected = mixture.shared_reference(mixture.activations)
    np.testing.assert_allclose(scales, expected_scales, rtol=1e-5)
    # A hidden unit on the edge between two integers may fall to the other side.
    errors = row_errors(y, expected)
    step = {"int8": 5e-3, "int16": 5e-3 / PLANE_RATIO, "float32": 0}[mixture.activations]
    assert np.quantile(errors, 0.8) < 1e-5
    assert errors.max() < step + 1e-6


@pytest.mark.parametrize("rows", [slice(0, 1), slice(3, 12), slice(5, 70)], ids=str)
def test_rows_do_not_depend_on_the_number_of_tokens(mixture: Mixture, rows: slice) -> None:
    for part, whole in zip(mixture.shared_expert(rows), mixture.shared_expert(), strict=True):
        np.testing.assert_array_equal(part, whole[rows])
