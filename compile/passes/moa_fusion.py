"""Mixture-of-experts fusion: router, top-k, gather, FFN and weighted sum become one expert call.

Unfused, `Gather` copies the weights of the chosen experts before it multiplies by them. Fused, a
kernel reads each chosen expert where it lies, through an id -> slot table.
"""

from __future__ import annotations

import tvm
from emberd.compile.passes import operators
from emberd.compile.passes.fuse_router import RouterPattern
from emberd.compile.passes.rewrite import (
    Matches,
    is_op,
    multiply,
    pattern_pass,
    silu,
    wildcard,
)
from tvm import relax
from tvm.relax.dpl import is_tuple_get_item


def moa_fusion() -> tvm.transform.Pass:
    """Fuse every mixture of SwiGLU experts into router(x) -> (ids, w) and moe(x, ids, w, ...).

    Matches sum_k w[:, k] * down[ids[:, k]] (silu(gate) * up) with [gate | up] =
    gate_up[ids[:, k]] x, for any number of experts, top-k and sizes, over the router of
    `fuse_router`. Result: moe(x f32[T,H], ids i32[T,K], weights f32[T,K], gate_up f32[E,2I,H],
    down f32[E,H,I]) -> f32[T,H].
    """
    router = RouterPattern()
    gate_up, down = wildcard(), wildcard()
    ids = router.ids
    column = is_op("relax.expand_dims")(is_op("relax.expand_dims")(router.x)) | is_op(
        "relax.expand_dims"
    )(router.x)
    projected = is_op("relax.matmul")(column, _transposed(is_op("relax.take")(gate_up, ids)))
    halves = is_op("relax.split")(projected)
    gate, up = is_tuple_get_item(halves, 0), is_tuple_get_item(halves, 1)
    hidden = multiply(silu(gate), up)
    output = is_op("relax.matmul")(hidden, _transposed(is_op("relax.take")(down, ids)))
    weighted = multiply(is_op("relax.squeeze")(output), is_op("relax.expand_dims")(router.weights))
    pattern = is_op("relax.sum")(weighted)

    def rewriter(matched: relax.Expr, matches: Matches) -> relax.Expr:
        routed = router.call(matches)
        tensors = [
            matches[router.x],
            relax.TupleGetItem(routed, 0),
            relax.TupleGetItem(routed, 1),
            matches[gate_up],
            matches[down],
        ]
        return operators.call("moe", tensors, [], matched.ty)

    return pattern_pass("moa_fusion", pattern, rewriter, "mixture of experts")


def _transposed(weights: relax.dpl.DFPattern) -> relax.dpl.DFPattern:
    return is_op("relax.permute_dims")(weights)
