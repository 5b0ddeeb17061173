"""x86-64-v3: AVX2, FMA and F16C (Haswell, Zen and later)."""

from collections.abc import Sequence

from emberd.compile.isa.definition import Isa
from emberd.compile.isa.vector import Expr, broadcast, intrinsic, type_of, vector_type
from tvm.script import tirx as T  # noqa: N812

LANES = 8


def dot_group(
    zero_point: int, weights: Sequence[Expr], activations: Sequence[Expr], activation_sum: Expr
) -> Expr:
    """vpmaddubsw, whose int16 sums of two products saturate, so each case keeps them in range.

    4-bit weights stay unsigned: eight sums of two reach 8 * 2 * 15 * 127 = 30480 and are added
    before they are widened. 8-bit weights give their sign to the activations: at most
    2 * 127 * 127 = 32258.
    """
    bits4 = zero_point == 8
    total = broadcast(activation_sum * T.int32(-zero_point), LANES) if bits4 else None
    ones = T.broadcast(T.int16(1), 16)
    pairs = None
    for weight, activation in zip(weights, activations, strict=True):
        x = T.Bind(T.reinterpret("int8x32", broadcast(activation, LANES)))
        if bits4:
            product = intrinsic(
                "int16x16", "llvm.x86.avx2.pmadd.ub.sw", T.reinterpret("int8x32", weight), x
            )
            pairs = T.Bind(product if pairs is None else pairs + product)
            continue
        signed = T.Bind(T.reinterpret("int8x32", weight ^ T.broadcast(T.uint8(128), 32)))
        product = intrinsic(
            "int16x16",
            "llvm.x86.avx2.pmadd.ub.sw",
            intrinsic("int8x32", "llvm.x86.avx2.psign.b", signed, signed),
            intrinsic("int8x32", "llvm.x86.avx2.psign.b", x, signed),
        )
        quads = intrinsic("int32x8", "llvm.x86.avx2.pmadd.wd", product, ones)
        total = T.Bind(quads if total is None else total + quads)
    if bits4:
        total = T.Bind(total + intrinsic("int32x8", "llvm.x86.avx2.pmadd.wd", pairs, ones))
    return total


def half_to_float(bits: Expr) -> Expr:
    """vcvtph2ps."""
    lanes = type_of(bits)[1]
    return T.Cast(vector_type("float32", lanes), T.reinterpret(vector_type("float16", lanes), bits))


AVX2 = Isa(
    name="avx2",
    target={"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "x86-64-v3"},
    lanes=LANES,
    cpu_features=("abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"),
    dot_group=dot_group,
    half_to_float=half_to_float,
)
