"""Router: softmax over all experts, the top k of them, renormalised to sum to one."""

from __future__ import annotations

import tvm
from emberd.compile.kernels.router import padded
from emberd.compile.passes import operators
from emberd.compile.passes.rewrite import Matches, is_op, linear, pattern_pass, wildcard
from tvm import relax
from tvm.relax.dpl import is_tuple_get_item


class RouterPattern:
    """The sub-patterns of a router, shared with `moa_fusion`."""

    def __init__(self) -> None:
        self.x, self.weight = wildcard(), wildcard()
        softmax = is_op("relax.nn.softmax")(linear(self.x, self.weight))
        probabilities = softmax.has_attr({"axis": -1})
        self.top_k = is_op("relax.topk")(probabilities).has_attr({"axis": -1, "largest": True})
        values = is_tuple_get_item(self.top_k, 0)
        self.ids = is_tuple_get_item(self.top_k, 1)
        total = is_op("relax.sum")(values).has_attr({"axis": [-1], "keepdims": True})
        self.weights = is_op("relax.divide")(values, total)

    def call(self, matches: Matches) -> relax.Call:
        """router(x f32[T,H], weight f32[E,H]) -> (ids i32[T,K], weights f32[T,K], scores
        f32[T,padded(E)])."""
        x, weight = matches[self.x], matches[self.weight]
        top_k = int(matches[self.top_k].attrs.k)
        tokens, experts = x.ty.shape[0], int(weight.ty.shape[0])
        shape = [tokens, top_k]
        result = [
            operators.tensor(shape, "int32"),
            operators.tensor(shape),
            operators.tensor([tokens, padded(experts)]),
        ]
        return operators.call("router", [x, weight], [top_k], result)


def fuse_router() -> tvm.transform.Pass:
    """Routers that `moa_fusion` left (it was switched off) still need a kernel for their top-k."""
    router = RouterPattern()

    def weights(_matched: relax.Expr, matches: Matches) -> relax.Expr:
        return relax.TupleGetItem(router.call(matches), 1)

    def ids(matched: relax.Expr, matches: Matches) -> relax.Expr:
        return relax.op.astype(relax.TupleGetItem(router.call(matches), 0), matched.ty.dtype)

    return tvm.transform.Sequential(
        [
            pattern_pass("fuse_router", router.weights, weights, "router weights"),
            pattern_pass("fuse_router", router.ids, ids, "router ids"),
            relax.transform.EliminateCommonSubexpr(),
        ],
        name="fuse_router",
    )
