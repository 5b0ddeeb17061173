"""The end of an MoE layer as one operator: residual + (routed + sigmoid(gate) * shared)."""

from __future__ import annotations

import tvm
from emberd.compile.passes import operators
from emberd.compile.passes.rewrite import Matches, add, is_op, multiply, pattern_pass, wildcard
from tvm import relax


def fuse_gated_sum() -> tvm.transform.Pass:
    """gated_sum(gate f32[T,1], shared f32[T,H], routed f32[T,H], residual f32[T,H])."""
    gate, shared, routed, residual = wildcard(), wildcard(), wildcard(), wildcard()
    gated = multiply(is_op("relax.sigmoid")(gate), shared)
    pattern = add(residual, add(routed, gated))

    def rewriter(matched: relax.Expr, matches: Matches) -> relax.Expr | None:
        shape = operators.static_shape(matched)
        tensors = [matches[part] for part in (gate, shared, routed, residual)]
        if operators.static_shape(tensors[0]) != (shape[0], 1):
            return None
        if any(operators.static_shape(tensor) != shape for tensor in tensors[1:]):
            return None
        return operators.call("gated_sum", tensors, [], matched.ty)

    return pattern_pass("fuse_gated_sum", pattern, rewriter, "gated shared expert")
