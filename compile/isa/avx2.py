"""x86-64-v3: AVX2, FMA and F16C (Haswell, Zen and later)."""

from collections.abc import Iterable, Sequence

from emberd.compile.isa.definition import Isa, sum_planes
from emberd.compile.isa.vector import Expr, broadcast, intrinsic, type_of, vector_type
from tvm.script import tirx as T  # noqa: N812

LANES = 8


def dot_group(
    zero_point: int, weights: Iterable[Expr], planes: Sequence[Sequence[Expr]], bias: Expr
) -> Expr:
    """vpmaddubsw, whose int16 sums of two products saturate, so each case keeps them in range.

    4-bit weights stay unsigned: eight sums of two reach 8 * 2 * 15 * 127 = 30480 and are added
    before they are widened. 8-bit weights give their sign to the activations: at most
    2 * 127 * 127 = 32258.
    """
    weights = list(weights)
    if zero_point != 8:
        return sum_planes([_dot_signed(weights, plane) for plane in planes])
    products = [_dot_unsigned(weights, plane) for plane in planes]
    return T.Bind(sum_planes(products) + broadcast(bias, LANES))


def _dot_unsigned(weights: Sequence[Expr], plane: Sequence[Expr]) -> Expr:
    pairs = None
    for weight, activation in zip(weights, plane, strict=True):
        product = _multiply_pairs(T.reinterpret("int8x32", weight), _bytes(activation))
        pairs = T.Bind(product if pairs is None else pairs + product)
    return _add_pairs(pairs)


def _dot_signed(weights: Sequence[Expr], plane: Sequence[Expr]) -> Expr:
    total = None
    for weight, activation in zip(weights, plane, strict=True):
        signed = T.Bind(T.reinterpret("int8x32", weight ^ T.broadcast(T.uint8(128), 32)))
        magnitude = intrinsic("int8x32", "llvm.x86.avx2.psign.b", signed, signed)
        x = intrinsic("int8x32", "llvm.x86.avx2.psign.b", _bytes(activation), signed)
        quads = _add_pairs(_multiply_pairs(magnitude, x))
        total = T.Bind(quads if total is None else total + quads)
    return total


def _bytes(activation: Expr) -> Expr:
    """Four activations, for every row."""
    return T.Bind(T.reinterpret("int8x32", broadcast(activation, LANES)))


def _multiply_pairs(unsigned: Expr, signed: Expr) -> Expr:
    return intrinsic("int16x16", "llvm.x86.avx2.pmadd.ub.sw", unsigned, signed)


def _add_pairs(pairs: Expr) -> Expr:
    return T.Bind(
        intrinsic("int32x8", "llvm.x86.avx2.pmadd.wd", pairs, T.broadcast(T.int16(1), 16))
    )


def half_to_float(bits: Expr) -> Expr:
    """vcvtph2ps."""
    lanes = type_of(bits)[1]
    return T.Cast(vector_type("float32", lanes), T.reinterpret(vector_type("float16", lanes), bits))


def add_pairs(total: Expr, a: Expr, b: Expr) -> Expr:
    """vpmaddwd."""
    return T.Bind(total + intrinsic("int32x8", "llvm.x86.avx2.pmadd.wd", a, b))


AVX2 = Isa(
    name="avx2",
    target={"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "x86-64-v3"},
    lanes=LANES,
    cpu_features=("abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"),
    dot_group=dot_group,
    half_to_float=half_to_float,
    add_pairs=add_pairs,
)
