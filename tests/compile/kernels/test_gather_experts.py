"""gather_experts: exactly the unpacked matrices, in every format, on every ISA of this machine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from emberd.compile.isa.isa import Isa
from emberd.compile.kernels.gather_experts import Matrix, gather_experts, reference
from emberd.compile.quantize.formats import FORMATS, pack_expert, unpack_expert
from emberd.daemon.errors import EmberdError
from random_shapes import odd, random_shapes

CASES = [  # format, hidden, intermediate, experts, top_k
    ("f32", 19, 7, 5, 2),
    ("f32", 64, 32, 2, 1),
    ("q8", 96, 32, 3, 3),
    ("q8", 32, 160, 4, 2),
    ("q4", 320, 96, 12, 5),
]
CASES += random_shapes(
    "gather_experts",
    lambda r: (
        r.choice(["q8", "q4"]),
        *(32 * r.randint(1, 6) for _ in range(2)),
        odd(r, 5, 15),
        r.randint(1, 5),
    ),
)
MATRICES: tuple[Matrix, ...] = ("gate_up", "down")
TOKENS = 3
SPARE = 3  # slots of the bank that no id refers to


@pytest.fixture(scope="module")
def library(isa: Isa, harness: Any) -> Any:
    return harness.library(
        isa,
        [
            gather_experts(
                isa,
                format=name,
                matrix=matrix,
                hidden=hidden,
                intermediate=intermediate,
                experts=experts,
                top_k=top_k,
                tokens=tokens,
            )
            for name, hidden, intermediate, experts, top_k in CASES
            for matrix in MATRICES
            for tokens in (1, None)
        ],
    )


@pytest.mark.parametrize("matrix", MATRICES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_copies_the_matrices_of_the_chosen_experts(
    library: Any, harness: Any, case: tuple[str, int, int, int, int], matrix: Matrix
) -> None:
    name, hidden, intermediate, experts, top_k = case
    random = np.random.default_rng(hidden)
    table = random.permutation(experts + SPARE)[:experts].astype(np.int32)
    blobs, unpacked = [], []
    for _ in range(experts):
        gate_up = random.standard_normal((2 * intermediate, hidden)).astype(np.float32)
        down = random.standard_normal((hidden, intermediate)).astype(np.float32)
        blobs.append(pack_expert(FORMATS[name], gate_up, down))
        pair = unpack_expert(FORMATS[name], blobs[-1], hidden, intermediate)
        unpacked.append(pair[MATRICES.index(matrix)])
    bank = np.full((experts + SPARE, len(blobs[0])), 0xFF, np.uint8)
    bank[table] = blobs
    ids = np.stack([random.permutation(experts)[:top_k] for _ in range(TOKENS)]).astype(np.int32)
    expected = reference(ids, np.stack(unpacked))
    symbol = f"gather_experts_{name}_{matrix}_h{hidden}_i{intermediate}_e{experts}_k{top_k}"
    for part, suffix in [(slice(None), "tn"), (slice(1, 2), "t1")]:
        gathered = harness.empty(np.float32, expected[part].shape)
        arguments = [harness.aligned(array) for array in (ids[part], table, bank)]
        library(f"{symbol}_{suffix}", *arguments, gathered)
        np.testing.assert_array_equal(gathered, expected[part])


def test_dimensions_that_the_format_cannot_take(isa: Isa) -> None:
    with pytest.raises(EmberdError, match="multiple of 32"):
        gather_experts(
            isa,
            format="q4",
            matrix="down",
            hidden=64,
            intermediate=40,
            experts=4,
            top_k=2,
            tokens=1,
        )
