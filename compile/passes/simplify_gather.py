"""ONNX lets Gather count from the end with negative indices; token and expert ids never do."""

from __future__ import annotations

import tvm
from emberd.compile.passes.rewrite import (
    Matches,
    add,
    constant_value,
    is_op,
    pattern_pass,
    wildcard,
)
from tvm import relax
from tvm.relax.dpl import is_tuple_get_item


def simplify_gather() -> tvm.transform.Pass:
    """Rewrite where(i < 0, i + n, i) to i when i is a top-k result or a graph input.

    The blocks' only index inputs are token ids and positions, which the core checks.
    """
    chosen = is_tuple_get_item(is_op("relax.topk")(wildcard()), 1)
    index, zero = chosen | wildcard(), wildcard()
    pattern = is_op("relax.where")(is_op("relax.less")(index, zero), add(index, wildcard()), index)

    def rewriter(_matched: relax.Expr, matches: Matches) -> relax.Expr | None:
        trusted = chosen in matches or isinstance(matches[index], relax.Var)
        return matches[index] if trusted and constant_value(matches[zero]) == 0 else None

    return pattern_pass("simplify_gather", pattern, rewriter, "index wrapping removed")
