"""RMSNorm (Zhang & Sennrich 2019), zero-centred or plain, with or without a SiLU gate."""

from __future__ import annotations

import tvm
from emberd.compile.passes import operators
from emberd.compile.passes.rewrite import (
    Matches,
    add,
    constant_value,
    is_op,
    multiply,
    operator,
    pattern_pass,
    silu,
    wildcard,
)
from tvm import relax


def fuse_rms_norm() -> tvm.transform.Pass:
    """x / sqrt(mean(x*x, -1) + eps) * (w or 1 + w) becomes rms_norm(x, w; eps, zero_centred)."""
    x, eps, scale = wildcard(), wildcard(), wildcard()
    mean = is_op("relax.mean")(multiply(x, x))
    root = is_op("relax.sqrt")(add(mean, eps))
    pattern = multiply(is_op("relax.divide")(x, root), scale)

    def rewriter(matched: relax.Expr, matches: Matches) -> relax.Expr | None:
        epsilon = constant_value(matches[eps])
        reduced = matches[mean]
        if epsilon is None or [int(axis) for axis in reduced.attrs.axis] not in ([-1],):
            return None
        weight, zero_centred = matches[scale], 0
        if len(weight.ty.shape) != 1:
            return None
        return operators.call("rms_norm", [matches[x], weight], [epsilon, zero_centred], matched.ty)

    return pattern_pass("fuse_rms_norm", pattern, rewriter, "RMSNorm")


def centre_rms_norm() -> tvm.transform.Pass:
    """rms_norm(x, w + 1) becomes a zero-centred rms_norm(x, w)."""
    x, weight, one, eps = wildcard(), wildcard(), wildcard(), wildcard()
    pattern = operator("rms_norm", x, add(weight, one), eps, wildcard())

    def rewriter(matched: relax.Expr, matches: Matches) -> relax.Expr | None:
        if constant_value(matches[one]) != 1.0:
            return None
        epsilon = float(matches[eps].value)
        return operators.call("rms_norm", [matches[x], matches[weight]], [epsilon, 1], matched.ty)

    return pattern_pass("centre_rms_norm", pattern, rewriter, "zero-centred weight")


def gate_rms_norm() -> tvm.transform.Pass:
    """rms_norm(x, w) * silu(gate) becomes rms_norm(x, w, gate)."""
    x, weight, eps, centred, gate = (wildcard() for _ in range(5))
    pattern = multiply(operator("rms_norm", x, weight, eps, centred), silu(gate))

    def rewriter(matched: relax.Expr, matches: Matches) -> relax.Expr:
        scalars = [float(matches[eps].value), int(matches[centred].value)]
        tensors = [matches[x], matches[weight], matches[gate]]
        return operators.call("rms_norm", tensors, scalars, matched.ty)

    return pattern_pass("gate_rms_norm", pattern, rewriter, "SiLU gate in RMSNorm")
