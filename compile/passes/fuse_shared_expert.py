"""The shared expert of a mixture, its gate and the residual move into the `moe` operator."""

from __future__ import annotations

import tvm
from emberd.compile.passes import operators
from emberd.compile.passes.rewrite import Matches, operator, pattern_pass, wildcard
from tvm import relax
from tvm.relax.dpl import DFPattern


def fuse_shared_expert() -> tvm.transform.Pass:
    """gated_sum(expert_gate x, down(silu(gate x) * (up x)), moe(x, ...), residual) becomes one moe.

    Runs behind `quantise`; the shared expert must have the format and activations of the routed
    ones. Result: moe(x f32[T,H], ids, weights, scores, gate, up, down, expert_gate f32[1,H],
    residual f32[T,H], table, bank), with the width of the shared expert as its last scalar.
    """
    x, residual = wildcard(), wildcard()
    gate, up, down, expert_gate = (_Linear() for _ in range(4))
    kind = wildcard()
    units = operator("gated_activation", gate.of(x), up.of(x), kind)
    tensors = [wildcard() for _ in range(5)]  # ids, weights, scores, table, bank
    scalars = [wildcard() for _ in range(5)]
    moe = operator("moe", x, *tensors, *scalars)
    pattern = operator("gated_sum", expert_gate.of(x), down.of(units), moe, residual)

    def rewriter(matched: relax.Expr, matches: Matches) -> relax.Expr | None:
        routed = [operators.scalar(matches[scalar]) for scalar in scalars]
        name, activations = routed[0], routed[-1]
        shared = [part.scalars(matches) for part in (gate, up, down)]
        if any((part[0], part[3]) != (name, activations) for part in shared):
            return None
        if expert_gate.scalars(matches)[0] != "f32" or operators.scalar(matches[kind]) != "silu":
            return None
        *routing, table, bank = (matches[tensor] for tensor in tensors)
        weights_of = [matches[part.weight] for part in (gate, up, down, expert_gate)]
        inputs = [matches[x], *routing, *weights_of, matches[residual], table, bank]
        return operators.call("moe", inputs, [*routed, shared[0][1]], matched.ty)

    return pattern_pass("fuse_shared_expert", pattern, rewriter, "shared expert")


class _Linear:
    """A projection as `quantise` leaves it: format, rows, columns, precision of activations."""

    def __init__(self) -> None:
        self.weight = wildcard()
        self._scalars = [wildcard() for _ in range(4)]

    def of(self, x: DFPattern) -> DFPattern:
        return operator("linear", x, self.weight, *self._scalars)

    def scalars(self, matches: Matches) -> list[operators.Scalar]:
        return [operators.scalar(matches[scalar]) for scalar in self._scalars]
