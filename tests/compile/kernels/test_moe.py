"""moe: every format against numpy on the unpacked experts, on every ISA of this machine."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from emberd.compile.isa.isa import Isa
from emberd.compile.kernels.moe import (
    expert_outputs,
    expert_outputs_scratch,
    moe,
    moe_scratch,
    reference,
)
from emberd.compile.kernels.weighted_sum import weighted_sum
from emberd.compile.quantize.activations import PLANE_RATIO, Precision, quantise_reference
from emberd.compile.quantize.formats import FORMATS, pack_expert, unpack_expert
from emberd.daemon.errors import EmberdError

Case = tuple[str, Precision, int, int, int, int]
CASES: list[Case] = [  # format, activations, hidden, intermediate, experts, top_k
    ("f32", "float32", 19, 7, 5, 2),
    ("f32", "float32", 64, 32, 2, 1),
    ("q8", "int8", 96, 32, 3, 3),
    ("q4", "int8", 320, 96, 40, 10),
    ("q4", "int16", 64, 96, 4, 2),
]
TOKENS = 57
SPARE = 3  # slots of the bank that no id refers to


@pytest.fixture(scope="module")
def library(isa: Isa, harness: Any) -> Any:
    kernels = []
    for name, activations, hidden, intermediate, experts, top_k in CASES:
        static: Any = {
            "format": name,
            "activations": activations,
            "hidden": hidden,
            "intermediate": intermediate,
            "experts": experts,
            "top_k": top_k,
        }
        kernels += [
            moe(isa, **static),
            expert_outputs(isa, **static),
            weighted_sum(isa, columns=hidden, top_k=top_k),
        ]
    return harness.library(isa, kernels)


class Problem:
    """Random tokens and experts of one case; the experts lie in the bank in a random order."""

    def __init__(self, case: Case, harness: Any, library: Any) -> None:
        self.format, self.activations, self.hidden, self.intermediate, *counts = case
        self.experts, self.top_k = counts
        weight_format = FORMATS[self.format]
        random = np.random.default_rng(self.hidden)
        self.table = random.permutation(self.experts + SPARE)[: self.experts].astype(np.int32)
        self.gate_up = np.empty((self.experts, 2 * self.intermediate, self.hidden), np.float32)
        self.down = np.empty((self.experts, self.hidden, self.intermediate), np.float32)
        blobs = []
        for expert in range(self.experts):
            gate_up = (random.standard_normal(self.gate_up.shape[1:]) / 8).astype(np.float32)
            down = (random.standard_normal(self.down.shape[1:]) / 8).astype(np.float32)
            blobs.append(pack_expert(weight_format, gate_up, down))
            self.gate_up[expert], self.down[expert] = unpack_expert(
                weight_format, blobs[-1], self.hidden, self.intermediate
            )
        bank = np.full((self.experts + SPARE, len(blobs[0])), 0xFF, np.uint8)
        bank[self.table] = blobs
        self.bank = harness.aligned(bank)
        self.x = random.standard_normal((TOKENS, self.hidden)).astype(np.float32)
        # Low ids are chosen by most tokens, high ones by none: full blocks, rests, idle experts.
        likes = 1.0 / (1 + np.arange(self.experts)) ** 2
        keys = random.random((TOKENS, self.experts)) ** (1 / likes)
        self.ids = np.argsort(-keys, axis=1)[:, : self.top_k].astype(np.int32)
        self.weights = random.random((TOKENS, self.top_k)).astype(np.float32)
        self._harness, self._library = harness, library

    @property
    def _static(self) -> dict[str, Any]:
        return {
            "format": self.format,
            "activations": self.activations,
            "hidden": self.hidden,
            "intermediate": self.intermediate,
            "top_k": self.top_k,
        }

    @property
    def _parameters(self) -> str:
        types = self.format + {"int8": "a8", "int16": "a16", "float32": ""}[self.activations]
        return f"{types}_h{self.hidden}_i{self.intermediate}_e{self.experts}_k{self.top_k}"

    def one(self, row: int) -> np.ndarray:
        """y [1, H] of one row of x."""
        aligned, rows = self._harness.aligned, slice(row, row + 1)
        y: np.ndarray = self._harness.empty(np.float32, (1, self.hidden))
        self._library(
            f"moe_{self._parameters}_t1",
            *(aligned(array[rows]) for array in (self.x, self.ids, self.weights)),
            aligned(self.table),
            self.bank,
            y,
            *self._harness.scratch(moe_scratch(**self._static)),
        )
        return y

    def many(self, rows: slice = slice(None), waves: int = 1) -> np.ndarray:
        """y of some rows of x; `waves`: calls that each compute their share of the experts."""
        aligned, ids = self._harness.aligned, self.ids[rows]
        outputs = self._harness.empty(np.float32, (ids.size, self.hidden))
        y: np.ndarray = self._harness.empty(np.float32, (len(ids), self.hidden))
        scratch = expert_outputs_scratch(len(ids), experts=self.experts, **self._static)
        for wave in range(waves):
            left_out = np.arange(self.experts) % waves != wave
            self._library(
                f"expert_outputs_{self._parameters}",
                aligned(self.x[rows]),
                aligned(ids),
                aligned(np.where(left_out, -1, self.table).astype(np.int32)),
                self.bank,
                outputs,
                *self._harness.scratch(scratch),
            )
        self._library(
            f"weighted_sum_n{self.hidden}_k{self.top_k}", outputs, aligned(self.weights[rows]), y
        )
        return y

    def reference(self, activations: Precision) -> np.ndarray:
        return reference(
            self.x,
            self.ids,
            self.weights,
            self.gate_up,
            self.down,
            partial(quantise_reference, activations=activations),
        )


@pytest.fixture(params=CASES, ids=lambda case: "-".join(map(str, case)))
def problem(request: pytest.FixtureRequest, harness: Any, library: Any) -> Problem:
    return Problem(request.param, harness, library)


def _row_errors(y: np.ndarray, expected: np.ndarray) -> np.ndarray:
    errors: np.ndarray = np.linalg.norm(y - expected, axis=1) / np.linalg.norm(expected, axis=1)
    return errors


def test_agrees_with_reference(problem: Problem) -> None:
    errors = _row_errors(problem.many(), problem.reference(problem.activations))
    # A hidden unit on the edge between two integers may fall to the other side: a step of one unit,
    # in few of the rows.
    step = {"int8": 5e-3, "int16": 5e-3 / PLANE_RATIO, "float32": 0}[problem.activations]
    assert np.quantile(errors, 0.8) < 1e-5
    assert errors.max() < step + 1e-6


def test_quantised_activations_cost_little(problem: Problem) -> None:
    """Two matrices in a row: twice the percent of one."""
    errors = _row_errors(problem.many(), problem.reference("float32"))
    assert np.median(errors) < {"int8": 0.02, "int16": 8e-5, "float32": 1e-6}[problem.activations]


def test_rows_do_not_depend_on_the_number_of_tokens(problem: Problem) -> None:
    many = problem.many()
    for row in (0, 20, TOKENS - 1):
        np.testing.assert_array_equal(problem.one(row), many[row : row + 1])
    np.testing.assert_array_equal(problem.many(slice(9, 31)), many[9:31])


@pytest.mark.parametrize("waves", [2, 3, 40])
def test_experts_may_come_in_waves(problem: Problem, waves: int) -> None:
    np.testing.assert_array_equal(problem.many(waves=waves), problem.many())


def test_all_tokens_choose_the_same_expert(problem: Problem) -> None:
    problem.ids[:] = problem.experts - 1
    many = problem.many()
    np.testing.assert_array_equal(problem.one(3), many[3:4])
    assert _row_errors(many, problem.reference(problem.activations)).max() < 5e-3


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
        )
