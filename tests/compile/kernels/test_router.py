"""router: ids and weights against numpy, ties, NaN, on every ISA of this machine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from emberd.compile.isa.isa import Isa
from emberd.compile.kernels.router import padded, reference, router
from random_shapes import odd, random_shapes

CASES = [(64, 256, 8), (40, 2, 1), (33, 17, 4), (16, 9, 9)]  # hidden, experts, top_k

CASES += random_shapes("router", lambda r: (odd(r, 9, 99), odd(r, 11, 200), r.randint(1, 10)))


@pytest.fixture(scope="module")
def library(isa: Isa, harness: Any) -> Any:
    return harness.library(
        isa,
        [
            router(isa, hidden=hidden, experts=experts, top_k=top_k, tokens=tokens)
            for hidden, experts, top_k in CASES
            for tokens in (1, None)
        ],
    )


def _run(
    library: Any, harness: Any, x: np.ndarray, weight: np.ndarray, top_k: int, suffix: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids, weights, scores."""
    experts, hidden = weight.shape
    ids = harness.empty(np.int32, (len(x), top_k))
    weights = harness.empty(np.float32, (len(x), top_k))
    scores = harness.empty(np.float32, (len(x), padded(experts)))
    library(
        f"router_h{hidden}_e{experts}_k{top_k}_{suffix}",
        harness.aligned(x),
        harness.aligned(weight),
        ids,
        weights,
        scores,
    )
    return ids, weights, scores


def _problem(hidden: int, experts: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(experts)
    x = random.standard_normal((21, hidden)).astype(np.float32)
    return x, random.standard_normal((experts, hidden)).astype(np.float32) / 4


@pytest.mark.parametrize(("hidden", "experts", "top_k"), CASES)
def test_agrees_with_reference(
    library: Any, harness: Any, hidden: int, experts: int, top_k: int
) -> None:
    x, weight = _problem(hidden, experts)
    ids, weights, scores = _run(library, harness, x, weight, top_k, "tn")
    expected_ids, expected_weights, expected_scores = reference(x, weight, top_k)
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_allclose(weights, expected_weights, rtol=1e-5)
    np.testing.assert_allclose(weights.sum(axis=1), 1, rtol=1e-6)
    np.testing.assert_allclose(scores, expected_scores, rtol=1e-5)


@pytest.mark.parametrize(("hidden", "experts", "top_k"), CASES)
def test_weights_are_shares_of_the_scores(
    library: Any, harness: Any, hidden: int, experts: int, top_k: int
) -> None:
    """Bit by bit, so that whoever changes a choice can weigh it as the router would have."""
    x, weight = _problem(hidden, experts)
    ids, weights, scores = _run(library, harness, x, weight, top_k, "tn")
    chosen = np.take_along_axis(scores, ids, axis=1)
    total = np.zeros(len(x), np.float32)
    for rank in range(top_k):
        total += chosen[:, rank]
    np.testing.assert_array_equal(weights, chosen / total[:, None])


@pytest.mark.parametrize(("hidden", "experts", "top_k"), CASES)
def test_rows_do_not_depend_on_the_number_of_tokens(
    library: Any, harness: Any, hidden: int, experts: int, top_k: int
) -> None:
    x, weight = _problem(hidden, experts)
    many = _run(library, harness, x, weight, top_k, "tn")
    for row in (0, 7, 20):
        rows = slice(row, row + 1)
        one = _run(library, harness, x[rows], weight, top_k, "t1")
        for result, all_rows in zip(one, many, strict=True):
            np.testing.assert_array_equal(result, all_rows[rows])


def test_ties_go_to_the_lower_id(library: Any, harness: Any) -> None:
    x, weight = _problem(33, 17)
    weight[[3, 11, 16]] = weight[5] = 1.0
    x = np.abs(x)
    ids, weights, _ = _run(library, harness, x, weight, 4, "tn")
    np.testing.assert_array_equal(ids, np.tile([3, 5, 11, 16], (len(x), 1)))
    np.testing.assert_allclose(weights, 0.25, rtol=1e-6)


def test_one_expert_far_above_the_others(library: Any, harness: Any) -> None:
    """Probabilities that underflow are still different experts, in order of their ids."""
    x, weight = np.ones((2, 33), np.float32), np.zeros((17, 33), np.float32)
    weight[6] = 100.0
    ids, weights, _ = _run(library, harness, x, weight, 4, "tn")
    np.testing.assert_array_equal(ids, [[6, 0, 1, 2]] * 2)
    np.testing.assert_array_equal(weights, [[1, 0, 0, 0]] * 2)


def test_ids_stay_in_range_for_nan(library: Any, harness: Any) -> None:
    x, weight = _problem(33, 17)
    x[:] = np.nan
    ids, *_ = _run(library, harness, x, weight, 4, "tn")
    assert ((ids >= 0) & (ids < 17)).all()
