"""ONNX lets Gather count from the end with negative indices; token and expert ids never do."""

from __future__ import annotations

import tvm
from emberd.compile.passes.rewrite import Matches, add, is_op, pattern_pass, wildcard
from tvm import relax


def simplify_gather() -> tvm.transform.Pass:
    """Rewrite where(i < 0, i + n, i) to i when i is a top-k result or a graph input.

    The blocks' only index inputs are token ids and positions, which the core checks.
    """
    index = wildcard()
    negative = is_op("relax.less")(index, wildcard())
    pattern = is_op("relax.where")(negative, add(index, wildcard()), index)

    def rewriter(_matched: relax.Expr, matches: Matches) -> relax.Expr:
        return matches[index]

    return pattern_pass("simplify_gather", pattern, rewriter, "index wrapping removed")
