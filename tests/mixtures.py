"""Mixtures of experts with random weights, for the kernels that compute them together."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from emberd.compile.isa.isa import Isa
from emberd.compile.kernels import moe, shared_expert
from emberd.compile.kernels.expert_outputs import expert_outputs, expert_outputs_scratch
from emberd.compile.kernels.moe import moe_scratch
from emberd.compile.kernels.shared_expert import shared_expert_scratch
from emberd.compile.kernels.weighted_sum import weighted_sum
from emberd.compile.quantize.activations import Precision, quantise_reference
from emberd.compile.quantize.formats import FORMATS, pack_expert, unpack_expert
from random_shapes import odd, random_shapes

Case = tuple[str, Precision, int, int, int, int, int]
CASES: list[Case] = [
    # format, activations, hidden, intermediate, experts, top_k, units of the shared expert
    ("f32", "float32", 19, 7, 5, 2, 9),
    ("f32", "float32", 64, 32, 2, 1, 0),
    ("q8", "int8", 96, 32, 3, 3, 64),
    ("q4", "int8", 320, 96, 40, 10, 32),
    ("q4", "int16", 64, 96, 4, 2, 96),
    ("q4", "int8", 64, 32, 4, 2, 0),
]
CASES += random_shapes(
    "mixture",
    lambda r: (
        r.choice(["q8", "q4"]),
        r.choice(["int8", "int16"]),
        *(32 * r.randint(1, 6) for _ in range(2)),
        odd(r, 5, 30),
        r.randint(1, 5),
        32 * r.randint(0, 3),
    ),
    count=1,
)
CASES += random_shapes(
    "mixture in float32",
    lambda r: ("f32", "float32", odd(r, 21, 70), odd(r, 1, 40), odd(r, 5, 9), 3, odd(r, 1, 20)),
    count=1,
)
SHARED_CASES = [case for case in CASES if case[-1]]
TOKENS = 77
SPARE = 3  # slots of the bank that no id refers to


def case_name(case: Case) -> str:
    return "-".join(map(str, case))


def mixture_library(isa: Isa, harness: Any) -> Any:
    """The kernels of all cases."""
    kernels = []
    for name, activations, hidden, intermediate, experts, top_k, shared in CASES:
        types: Any = {"format": name, "activations": activations, "hidden": hidden}
        static = {**types, "intermediate": intermediate, "experts": experts, "top_k": top_k}
        kernels += [
            moe.moe(isa, **static, shared=shared or None),
            expert_outputs(isa, **static),
            weighted_sum(isa, columns=hidden, top_k=top_k, shared=shared > 0),
        ]
        if shared:
            kernels.append(shared_expert.shared_expert(isa, **types, width=shared))
    by_name = {str(function.attrs["global_symbol"]): function for function in kernels}
    return harness.library(isa, list(by_name.values()))


class Mixture:
    """Random tokens and experts of one case; the experts lie in the bank in a random order."""

    def __init__(self, case: Case, harness: Any, library: Any) -> None:
        self.format, self.activations, self.hidden, self.intermediate, *counts = case
        self.experts, self.top_k, self.shared = counts
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
        self._draw_shared_expert(random)
        self._harness, self._library = harness, library

    def _draw_shared_expert(self, random: np.random.Generator) -> None:
        """`matrices`: gate, up, down; `expert_gate`; `residual`. No hidden units: none of them."""
        hidden, width, weight_format = self.hidden, self.shared, FORMATS[self.format]
        shapes = [(width, hidden), (width, hidden), (hidden, width)] if width else []
        drawn = [(random.standard_normal(shape) / 8).astype(np.float32) for shape in shapes]
        self.packed = [weight_format.pack(matrix) for matrix in drawn]
        self.matrices = [
            weight_format.unpack(packed, *shape)
            for packed, shape in zip(self.packed, shapes, strict=True)
        ]
        if self.format == "f32":
            self.packed = self.matrices
        self.expert_gate = random.standard_normal((1, hidden)).astype(np.float32) / 8
        self.residual = random.standard_normal((TOKENS, hidden)).astype(np.float32)

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
    def _types(self) -> str:
        return self.format + {"int8": "a8", "int16": "a16", "float32": ""}[self.activations]

    @property
    def _parameters(self) -> str:
        return f"{self._types}_h{self.hidden}_i{self.intermediate}_e{self.experts}_k{self.top_k}"

    @property
    def _shared_weights(self) -> list[np.ndarray]:
        weights = [*self.packed, self.expert_gate] if self.shared else []
        return [self._harness.aligned(array) for array in weights]

    def _residual(self, rows: slice) -> list[np.ndarray]:
        return [self._harness.aligned(self.residual[rows])] if self.shared else []

    def one(self, row: int) -> np.ndarray:
        """y [1, H] of one row of x."""
        aligned, rows = self._harness.aligned, slice(row, row + 1)
        y: np.ndarray = self._harness.empty(np.float32, (1, self.hidden))
        suffix = f"_s{self.shared}" if self.shared else ""
        scratch = moe_scratch(**self._static, shared=self.shared or None)
        self._library(
            f"moe_{self._parameters}{suffix}_t1",
            *(aligned(array[rows]) for array in (self.x, self.ids, self.weights)),
            *self._shared_weights,
            *self._residual(rows),
            aligned(self.table),
            self.bank,
            y,
            *self._harness.scratch(scratch),
        )
        return y

    def shared_expert(self, rows: slice = slice(None)) -> tuple[np.ndarray, np.ndarray]:
        """Scales [T, 1] and outputs [T, H] of some rows of x."""
        x = self._harness.aligned(self.x[rows])
        scales: np.ndarray = self._harness.empty(np.float32, (len(x), 1))
        y: np.ndarray = self._harness.empty(np.float32, x.shape)
        static: Any = {"format": self.format, "activations": self.activations}
        scratch = shared_expert_scratch(len(x), **static, hidden=self.hidden, width=self.shared)
        self._library(
            f"shared_expert_{self._types}_h{self.hidden}_s{self.shared}_tn",
            x,
            *self._shared_weights,
            scales,
            y,
            *self._harness.scratch(scratch),
        )
        return scales, y

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
        suffix = "_shared" if self.shared else ""
        self._library(
            f"weighted_sum{suffix}_n{self.hidden}_k{self.top_k}",
            outputs,
            aligned(self.weights[rows]),
            *(self.shared_expert(rows) if self.shared else ()),
            *self._residual(rows),
            y,
        )
        return y

    def reference(self, activations: Precision) -> np.ndarray:
        quantise = partial(quantise_reference, activations=activations)
        routed = moe.reference(self.x, self.ids, self.weights, self.gate_up, self.down, quantise)
        if not self.shared:
            return routed
        scales, y = self.shared_reference(activations)
        return self.residual + (routed + scales * y)

    def shared_reference(self, activations: Precision) -> tuple[np.ndarray, np.ndarray]:
        quantise = partial(quantise_reference, activations=activations)
        return shared_expert.reference(self.x, *self.matrices, self.expert_gate, quantise)


def row_errors(y: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Of each row, relative to its length."""
    errors: np.ndarray = np.linalg.norm(y - expected, axis=1) / np.linalg.norm(expected, axis=1)
    return errors
