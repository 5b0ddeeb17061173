"""What an instruction set is to the kernels."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from emberd.compile.isa.vector import Expr, broadcast, type_of
from tvm.script import tirx as T  # noqa: N812

GROUP = 32  # weights that share one scale

DotGroup = Callable[[int, Iterable[Expr], Sequence[Sequence[Expr]], Expr], Expr]
HalfToFloat = Callable[[Expr], Expr]
AddPairs = Callable[[Expr, Expr, Expr], Expr]


@dataclass(frozen=True)
class Isa:
    """One instruction set of a target: a kernel library is built for each.

    `dot_group(zero_point, weights, planes, bias)` is the exact integer dot product of one group of
    32 for `lanes` rows, as int32 x lanes:
        sum over j, b of (weights[j][4 * row + b] - zero_point) * x[4 * j + b]
    weights: 8 vectors uint8 x 4 lanes, zero_point 8 (values 0..15) or 128 (values 1..255); taken
    once each, in order, as they may be loaded when they are taken;
    planes: the activations x, as one plane or as a high and a low one, x = 254 * high + low; a
    plane is 8 int32 scalars of 4 int8 each, values -127..127;
    bias: int32, -zero_point * the sum of the 32 x: for sets that multiply unsigned weights.
    `half_to_float` converts uint16 x n, the bits of finite float16 numbers, to float32 x n exactly.
    `add_pairs(total, a, b)` adds to total, int32 x lanes, the products of a and b, int16 x 2 lanes:
        total[i] + a[2 i] * b[2 i] + a[2 i + 1] * b[2 i + 1]    (modulo 2^32; no element is -2^15)
    """

    name: str
    target: dict[str, object]  # for tvm.target.Target
    lanes: int  # float32 in a vector register
    cpu_features: tuple[str, ...]  # needed at run time; names as in /proc/cpuinfo
    dot_group: DotGroup
    half_to_float: HalfToFloat
    add_pairs: AddPairs


def sum_planes(products: Sequence[Expr]) -> Expr:
    """What the dot products with each plane of activations are together: 254 * high + low.

    Without a multiplication, which would take the units of the dot products.
    """
    if len(products) == 1:
        return products[0]
    high, low = products
    eight = broadcast(T.int32(8), type_of(high)[1])
    return T.Bind(T.shift_left(high, eight) + (low - (high + high)))
