"""fuse_router takes softmax -> top-k -> renormalise over a projection, and nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from emberd.compile.passes.fuse_router import fuse_router
from emberd.compile.passes.rewrite import report
from relax_functions import calls, function, random, run
from tvm import relax
from tvm.relax import op

TOKENS, HIDDEN, EXPERTS, TOP_K = 5, 16, 7, 3
PARAMETERS = {"x": (TOKENS, HIDDEN), "router": (EXPERTS, HIDDEN)}
ARGUMENTS = (random(TOKENS, HIDDEN), random(EXPERTS, HIDDEN))


def _router(**changes: Any) -> tvm.IRModule:
    """Ids and weights; `changes` to the attributes of softmax, top-k and sum."""

    def body(emit: Any, x: Any, router: Any) -> Any:
        scores = op.matmul(x, op.permute_dims(router, [1, 0]))
        probabilities = op.nn.softmax(scores, axis=changes.get("softmax", -1))
        largest = changes.get("largest", True)
        chosen = emit(op.topk(probabilities, TOP_K, largest=largest, dtype="int64"))
        values = emit(relax.TupleGetItem(chosen, 0))
        total = op.sum(values, changes.get("sum", -1), keepdims=True)
        return relax.TupleGetItem(chosen, 1), op.divide(values, total)

    return function(PARAMETERS, body)


def test_a_router_becomes_one_operator_with_ids_and_weights() -> None:
    after = fuse_router()(_router())
    assert calls(after).count("emberd.router") == 1
    assert "relax.topk" not in calls(after)
    assert report(after) == [
        "fuse_router: 1 x router weights (x, router)",
        "fuse_router: 1 x router ids (x, router)",
    ]
    x, router = (array.astype(np.float64) for array in ARGUMENTS)
    scores = np.exp(x @ router.T)
    ids = np.argsort(-scores)[:, :TOP_K]
    chosen = np.take_along_axis(scores, ids, 1)
    got_ids, got_weights = run(after, *ARGUMENTS)
    np.testing.assert_array_equal(got_ids, ids)
    np.testing.assert_allclose(got_weights, chosen / chosen.sum(1, keepdims=True), rtol=1e-5)


@pytest.mark.parametrize("change", [{"softmax": 0}, {"largest": False}], ids=str)
def test_other_choices_of_experts_are_left_alone(change: dict[str, Any]) -> None:
    before = _router(**change)
    after = fuse_router()(before)
    assert report(after) == []
    assert calls(after) == calls(before)


def test_a_sum_over_tokens_does_not_renormalise() -> None:
    after = fuse_router()(_router(sum=0))
    assert report(after) == ["fuse_router: 1 x router ids (x, router)"]
