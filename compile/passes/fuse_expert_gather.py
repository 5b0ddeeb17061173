"""Experts that `moa_fusion` left: gathering their matrices by expert id becomes one operator."""

from __future__ import annotations

import tvm
from emberd.compile.passes import operators
from emberd.compile.passes.rewrite import Matches, is_op, pattern_pass, wildcard
from tvm import relax


def fuse_expert_gather() -> tvm.transform.Pass:
    """take(experts f32[E,N,C], ids) on the first axis becomes gather_experts(ids, experts).

    ids are those of a router, i32[T,K]; the result is f32[T,K,N,C].
    """
    experts, ids = wildcard(), wildcard()
    pattern = is_op("relax.take")(experts, is_op("relax.astype")(ids)).has_attr({"axis": 0})

    def rewriter(matched: relax.Expr, matches: Matches) -> relax.Expr | None:
        weights, chosen = matches[experts], matches[ids]
        if not isinstance(weights, relax.Var) or len(weights.ty.shape) != 3:
            return None
        if len(chosen.ty.shape) != 2 or str(chosen.ty.dtype) != "int32":
            return None
        return operators.call("gather_experts", [chosen, weights], [], matched.ty)

    return pattern_pass("fuse_expert_gather", pattern, rewriter, "gather of experts")
