"""Any x86-64: SSE2 only. Correct everywhere, not tuned."""

from collections.abc import Iterable, Sequence

from emberd.compile.isa.definition import Isa, sum_planes
from emberd.compile.isa.vector import Expr, broadcast, intrinsic, type_of, vector_type
from tvm.script import tirx as T  # noqa: N812

LANES = 4


def dot_group(
    zero_point: int, weights: Iterable[Expr], planes: Sequence[Sequence[Expr]], bias: Expr
) -> Expr:
    """pmaddwd on bytes widened to int16: the even ones of every four, then the odd ones."""
    split = [_split_unsigned(weight) for weight in weights]
    products = [_dot(split, plane) for plane in planes]
    return T.Bind(sum_planes(products) + broadcast(bias, LANES))


def _dot(weights: Sequence[tuple[Expr, Expr]], plane: Sequence[Expr]) -> Expr:
    total = None
    for weight, activation in zip(weights, plane, strict=True):
        for w, x in zip(weight, _split_signed(broadcast(activation, LANES)), strict=True):
            pairs = intrinsic("int32x4", "llvm.x86.sse2.pmadd.wd", w, x)
            total = T.Bind(pairs if total is None else total + pairs)
    return total


def _split_unsigned(quads: Expr) -> tuple[Expr, Expr]:
    """uint8 x 16 -> their even and their odd bytes as int16 x 8."""
    words = T.Bind(T.reinterpret("uint16x8", quads))
    even = words & T.broadcast(T.uint16(255), 8)
    odd = T.shift_right(words, T.broadcast(T.uint16(8), 8))
    return T.Bind(T.reinterpret("int16x8", even)), T.Bind(T.reinterpret("int16x8", odd))


def _split_signed(quads: Expr) -> tuple[Expr, Expr]:
    """int8 quadruples in int32 x 4 -> their even and their odd bytes as int16 x 8."""
    words = T.Bind(T.reinterpret("int16x8", quads))
    eight = T.broadcast(T.int16(8), 8)
    even = T.shift_right(T.shift_left(words, eight), eight)
    return T.Bind(even), T.Bind(T.shift_right(words, eight))


def half_to_float(bits: Expr) -> Expr:
    """Exponent and mantissa moved to their float32 place, then scaled by 2^(127 - 15).

    Without F16C, LLVM would call a library function.
    """
    lanes = type_of(bits)[1]
    wide = T.Bind(T.Cast(vector_type("uint32", lanes), bits))
    magnitude = T.shift_left(
        wide & broadcast(T.uint32(0x7FFF), lanes), broadcast(T.uint32(13), lanes)
    )
    sign = T.shift_left(wide & broadcast(T.uint32(0x8000), lanes), broadcast(T.uint32(16), lanes))
    value = T.reinterpret(vector_type("float32", lanes), magnitude | sign)
    return T.Bind(value * broadcast(T.float32(2.0**112), lanes))


def add_pairs(total: Expr, a: Expr, b: Expr) -> Expr:
    """pmaddwd."""
    return T.Bind(total + intrinsic("int32x4", "llvm.x86.sse2.pmadd.wd", a, b))


GENERIC = Isa(
    name="generic",
    target={"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "x86-64"},
    lanes=LANES,
    cpu_features=("sse2",),
    dot_group=dot_group,
    half_to_float=half_to_float,
    add_pairs=add_pairs,
)
