"""silu(gate) * up (SwiGLU, Shazeer 2020) and sigmoid(gate) * up as one operator."""

from __future__ import annotations

import tvm
from emberd.compile.passes import operators
from emberd.compile.passes.rewrite import (
    Matches,
    is_op,
    multiply,
    pattern_pass,
    silu,
    wildcard,
)
from tvm import relax


def fuse_gated_activation() -> tvm.transform.Pass:
    """Gates of the same shape as what they gate become gated_activation(gate, up; kind)."""
    return tvm.transform.Sequential([_fuse("silu"), _fuse("sigmoid")], name="fuse_gated_activation")


def _fuse(kind: str) -> tvm.transform.Pass:
    gate, up = wildcard(), wildcard()
    activated = silu(gate) if kind == "silu" else is_op("relax.sigmoid")(gate)
    pattern = multiply(activated, up)

    def rewriter(matched: relax.Expr, matches: Matches) -> relax.Expr | None:
        first, second = matches[gate], matches[up]
        if operators.static_shape(first) != operators.static_shape(second):
            return None
        return operators.call("gated_activation", [first, second], [kind], matched.ty)

    return pattern_pass("fuse_gated_activation", pattern, rewriter, f"{kind} gate")
