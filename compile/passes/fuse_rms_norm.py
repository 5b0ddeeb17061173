"""RMSNorm (Zhang & Sennrich 2019), zero-centred or plain, with or without a SiLU gate."""

from __future__ import annotations

import tvm
from emberd.compile.passes import operators
from emberd.compile.passes.rewrite import (
    Matches,
    add,
    constant_value,
    is_const,
    is_op,
    multiply,
    operator,
    pattern_pass,
    silu,
    wildcard,
)
from tvm import relax


def fuse_rms_norm() -> tvm.transform.Pass:
    """RMSNorm over the last axis becomes one operator, with the gate that follows it inside.

    x / sqrt(mean(x*x, -1) + eps) * (w or 1 + w) becomes rms_norm(x, w; eps, zero_centred), and
    rms_norm(x, w) * silu(gate) becomes rms_norm(x, w, gate).
    """
    return tvm.transform.Sequential([_fuse_norm(), _fuse_gate()], name="fuse_rms_norm")


def _fuse_norm() -> tvm.transform.Pass:
    x, eps, weight, one = wildcard(), is_const(), wildcard(), is_const()
    scale = add(weight, one) | wildcard()
    mean = is_op("relax.mean")(multiply(x, x)).has_attr({"axis": [-1], "keepdims": True})
    root = is_op("relax.sqrt")(add(mean, eps))
    pattern = multiply(is_op("relax.divide")(x, root), scale)

    def rewriter(matched: relax.Expr, matches: Matches) -> relax.Expr | None:
        epsilon = constant_value(matches[eps])
        zero_centred = one in matches and constant_value(matches[one]) == 1.0
        factor = matches[weight if zero_centred else scale]
        if epsilon is None or len(factor.ty.shape) != 1:
            return None
        scalars = [epsilon, int(zero_centred)]
        return operators.call("rms_norm", [matches[x], factor], scalars, matched.ty)

    return pattern_pass("fuse_rms_norm", pattern, rewriter, "RMSNorm")


def _fuse_gate() -> tvm.transform.Pass:
    x, weight, eps, centred, gate = (wildcard() for _ in range(5))
    pattern = multiply(operator("rms_norm", x, weight, eps, centred), silu(gate))

    def rewriter(matched: relax.Expr, matches: Matches) -> relax.Expr:
        scalars = [float(matches[eps].value), int(matches[centred].value)]
        tensors = [matches[x], matches[weight], matches[gate]]
        return operators.call("rms_norm", tensors, scalars, matched.ty)

    return pattern_pass("fuse_rms_norm", pattern, rewriter, "SiLU gate of RMSNorm")
