"""rms_norm against numpy: plain, zero-centred and gated."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from emberd.compile.isa.isa import Isa
from emberd.compile.kernels.rms_norm import reference, rms_norm
from random_shapes import odd, random_shapes

CASES = [  # columns, zero_centred, gated
    (5, True, False),
    (24, False, True),
    (128, False, True),
    (200, True, False),
    (1024, True, False),
]
CASES += random_shapes("rms_norm", lambda r: (odd(r, 1, 300), True, False), count=1)
CASES += random_shapes("gated rms_norm", lambda r: (odd(r, 1, 300), False, True), count=1)
EPS = 1e-6
ROWS = 6


@pytest.fixture(scope="module")
def kernels(isa: Isa, harness: Any) -> dict[Any, Any]:
    functions = {
        (case, rows): rms_norm(
            isa, columns=case[0], eps=EPS, zero_centred=case[1], gated=case[2], rows=rows
        )
        for case in CASES
        for rows in (1, 2, None)
    }
    library = harness.library(isa, list(functions.values()))
    symbols = {key: str(function.attrs["global_symbol"]) for key, function in functions.items()}
    return {"library": library, "symbols": symbols}


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("magnitude", [1e-4, 1.0, 1e4])
def test_rows_agree_with_the_reference_however_they_are_grouped(
    case: tuple[int, bool, bool], magnitude: float, harness: Any, kernels: dict[Any, Any]
) -> None:
    columns, zero_centred, gated = case
    random = np.random.default_rng(columns)
    x = (random.standard_normal((ROWS, columns)) * magnitude).astype(np.float32)
    weight = harness.aligned(random.standard_normal(columns).astype(np.float32))
    gates = [random.standard_normal((ROWS, columns)).astype(np.float32)] * gated

    def run(rows: int | None) -> np.ndarray:
        step = rows or ROWS
        parts = []
        for first in range(0, ROWS, step):
            inputs, *gate = (harness.aligned(a[first : first + step]) for a in (x, *gates))
            parts.append(harness.empty(np.float32, inputs.shape))
            kernels["library"](kernels["symbols"][case, rows], inputs, weight, *gate, parts[-1])
        return np.concatenate(parts)

    many = run(None)
    expected = reference(
        x.astype(np.float64),
        weight.astype(np.float64),
        *(gate.astype(np.float64) for gate in gates),
        eps=EPS,
        zero_centred=zero_centred,
    )
    np.testing.assert_allclose(many, expected, rtol=1e-6, atol=1e-7 * np.abs(expected).max())
    assert np.array_equal(many, run(1))
    assert np.array_equal(many, run(2))


def test_names_tell_parameters_apart(isa: Isa) -> None:
    names = {
        str(
            rms_norm(isa, columns=8, eps=eps, zero_centred=centred, gated=gated, rows=rows).attrs[
                "global_symbol"
            ]
        )
        for eps in (1e-5, 1e-6)
        for centred in (False, True)
        for gated in (False, True)
        for rows in (1, 4, None)
    }
    assert len(names) == 24
    assert all(name.isidentifier() for name in names)
