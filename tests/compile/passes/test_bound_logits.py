"""bound_logits adds the bounds to what the head returns."""

from __future__ import annotations

from typing import Any

import numpy as np
from emberd.compile.passes.bound_logits import bound_logits
from emberd.compile.passes.rewrite import report
from emberd.daemon.program import BOUND_BLOCK
from relax_functions import calls, function, random, run
from tvm.relax import op


def _head(emit: Any, hidden: Any, weight: Any) -> Any:
    return op.matmul(emit(op.add(hidden, hidden)), weight)


def test_the_bounds_are_the_greatest_of_every_block() -> None:
    before = function({"hidden": (3, 8), "weight": (8, 100)}, _head)
    after = bound_logits()(before)
    assert calls(after) == ["relax.add", "relax.matmul", "emberd.block_maxima"]
    assert report(after) == [f"bound_logits: the greatest of every {BOUND_BLOCK} logits"]
    arguments = random(3, 8), random(8, 100)
    logits, bounds = run(after, *arguments)
    np.testing.assert_array_equal(logits, run(before, *arguments))
    parts = logits[:, :BOUND_BLOCK], logits[:, BOUND_BLOCK:]
    np.testing.assert_array_equal(bounds, np.stack([part.max(1) for part in parts], 1))
