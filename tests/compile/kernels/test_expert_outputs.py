"""expert_outputs: a part of the experts after the other, on every ISA of this machine.

What it computes is tested beside `moe`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from emberd.compile.isa.isa import Isa
from mixtures import CASES, Mixture, case_name, mixture_library


@pytest.fixture(scope="module")
def library(isa: Isa, harness: Any) -> Any:
    return mixture_library(isa, harness)


@pytest.fixture(params=CASES, ids=case_name)
def mixture(request: pytest.FixtureRequest, harness: Any, library: Any) -> Mixture:
    return Mixture(request.param, harness, library)


@pytest.mark.parametrize("waves", [2, 3, 40])
def test_experts_may_come_in_waves(mixture: Mixture, waves: int) -> None:
    np.testing.assert_array_equal(mixture.many(waves=waves), mixture.many())
