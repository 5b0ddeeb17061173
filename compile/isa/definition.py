"""What an instruction set is to the kernels."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from emberd.compile.isa.vector import Expr

GROUP = 32  # weights that share one scale

DotGroup = Callable[[int, Sequence[Expr], Sequence[Expr], Expr], Expr]
HalfToFloat = Callable[[Expr], Expr]


@dataclass(frozen=True)
class Isa:
    """One instruction set of a target: a kernel library is built for each.

    `dot_group(zero_point, weights, activations, activation_sum)` is the exact integer dot product
    of one group of 32 for `lanes` rows, as int32 x lanes:
        sum over j, b of (weights[j][4 * row + b] - zero_point) * activations[j][b]
    weights: 8 vectors uint8 x 4 lanes, zero_point 8 (values 0..15) or 128 (values 1..255);
    activations: 8 int32 scalars of 4 int8 each, values -127..127; activation_sum: int32, the sum
    of the group's 32 activations.
    `half_to_float` converts uint16 x n, the bits of finite float16 numbers, to float32 x n exactly.
    """

    name: str
    target: dict[str, object]  # for tvm.target.Target
    lanes: int  # float32 in a vector register
    cpu_features: tuple[str, ...]  # needed at run time; names as in /proc/cpuinfo
    dot_group: DotGroup
    half_to_float: HalfToFloat
