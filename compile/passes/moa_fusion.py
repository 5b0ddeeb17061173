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
from tvm.relax.dpl import DFPattern, is_tuple_get_item


def moa_fusion() -> tvm.transform.Pass:
    """Fuse every mixture of SwiGLU experts into router(x) -> (ids, w, scores) and moe(x, ids, ...).

    Matches sum_k w[:, k] * down[ids[:, k]] (silu(gate) * up) with [gate | up] =
    gate_up[ids[:, k]] x, for any number of experts, top-k and sizes, over the router of
    `fuse_router`. Result: moe(x f32[T,H], ids i32[T,K], weights f32[T,K], scores f32[T,padded(E)],
    gate_up f32[E,2I,H], down f32[E,H,I]) -> f32[T,H]; the scores are for whoever acquires experts.
    """
    router = RouterPattern()
    gate_up, down = wildcard(), wildcard()
    ids = router.ids
    column = _expanded(_expanded(router.x, 1), 2) | _expanded(router.x, 1, 2)
    projected = is_op("relax.matmul")(column, _gathered(gate_up, ids))
    halves = is_op("relax.split")(projected).has_attr({"axis": -1})
    gate, up = is_tuple_get_item(halves, 0), is_tuple_get_item(halves, 1)
    hidden = multiply(silu(gate), up)
    output = is_op("relax.matmul")(hidden, _gathered(down, ids))
    rows = is_op("relax.squeeze")(output).has_attr({"axis": [2]})
    weighted = multiply(rows, _expanded(router.weights, 2))
    pattern = is_op("relax.sum")(weighted).has_attr({"axis": [1], "keepdims": False})

    def rewriter(matched: relax.Expr, matches: Matches) -> relax.Expr | None:
        doubled, intermediate = matches[gate_up].ty.shape[1], matches[down].ty.shape[2]
        if int(doubled) != 2 * int(intermediate):
            return None
        routed = router.call(matches)
        tensors = [
            matches[router.x],
            *(relax.TupleGetItem(routed, index) for index in range(3)),
            matches[gate_up],
            matches[down],
        ]
        return operators.call("moe", tensors, [], matched.ty)

    return pattern_pass("moa_fusion", pattern, rewriter, "mixture of experts")


def _expanded(tensor: DFPattern, *axes: int) -> DFPattern:
    return is_op("relax.expand_dims")(tensor).has_attr({"axis": list(axes)})


def _gathered(experts: DFPattern, ids: DFPattern) -> DFPattern:
    """The transposed matrices [T, K, C, N] of the experts that ids name."""
    gathered = is_op("relax.take")(experts, ids).has_attr({"axis": 0})
    return is_op("relax.permute_dims")(gathered).has_attr({"axes": [0, 1, 3, 2]})
