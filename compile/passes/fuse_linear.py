"""Projections by a weight of the model, and the look-up of embeddings, as operators."""

from __future__ import annotations

import tvm
from emberd.compile.passes import operators
from emberd.compile.passes.rewrite import (
    Matches,
    add,
    is_op,
    linear,
    operator,
    pattern_pass,
    wildcard,
)
from tvm import relax


def fuse_linear() -> tvm.transform.Pass:
    """x W^T becomes linear(x f32[T,K], W f32[N,K]); a residual added to it moves inside."""
    return tvm.transform.Sequential([_fuse_matmul(), _fuse_residual()], name="fuse_linear")


def fuse_embedding() -> tvm.transform.Pass:
    """The rows of a table by token id: embedding(tokens i32[T], table f32[V,H]) -> f32[T,H]."""
    table, tokens = wildcard(), wildcard()
    pattern = is_op("relax.take")(table, tokens).has_attr({"axis": 0})

    def rewriter(matched: relax.Expr, matches: Matches) -> relax.Expr | None:
        if len(matches[table].ty.shape) != 2 or len(matches[tokens].ty.shape) != 1:
            return None
        if not isinstance(matches[table], relax.Var) or str(matches[table].ty.dtype) != "float32":
            return None
        return operators.call("embedding", [matches[tokens], matches[table]], [], matched.ty)

    return pattern_pass("fuse_embedding", pattern, rewriter, "embedding")


def _fuse_matmul() -> tvm.transform.Pass:
    x, weight = wildcard(), wildcard()

    def rewriter(matched: relax.Expr, matches: Matches) -> relax.Expr | None:
        if len(matches[x].ty.shape) != 2 or len(matches[weight].ty.shape) != 2:
            return None
        return operators.call("linear", [matches[x], matches[weight]], [], matched.ty)

    return pattern_pass("fuse_linear", linear(x, weight), rewriter, "projection")


def _fuse_residual() -> tvm.transform.Pass:
    x, weight, residual = wildcard(), wildcard(), wildcard()
    pattern = add(operator("linear", x, weight), residual)

    def rewriter(matched: relax.Expr, matches: Matches) -> relax.Expr | None:
        if operators.static_shape(matches[residual]) != operators.static_shape(matched):
            return None
        tensors = [matches[x], matches[weight], matches[residual]]
        return operators.call("linear", tensors, [], matched.ty)

    return pattern_pass("fuse_linear", pattern, rewriter, "residual added by its projection")
