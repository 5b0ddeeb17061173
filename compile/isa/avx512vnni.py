"""x86-64 with AVX-512 VNNI: Ice Lake, Zen 4 and later."""

from collections.abc import Iterable, Sequence

from emberd.compile.isa.avx2 import AVX2, half_to_float
from emberd.compile.isa.definition import Isa, sum_planes
from emberd.compile.isa.vector import Expr, broadcast, intrinsic
from tvm.script import tirx as T  # noqa: N812

LANES = 16


def dot_group(
    zero_point: int, weights: Iterable[Expr], planes: Sequence[Sequence[Expr]], bias: Expr
) -> Expr:
    """vpdpbusd on the unsigned weights; the bias is what the last sum starts from.

    Two sums hide half the latency: of the planes, or of the even and the odd quads of a single one.
    """
    single = len(planes) == 1
    sums = [T.Bind(broadcast(start, LANES)) for start in (T.int32(0), bias)]
    for quad, (weight, *activations) in enumerate(zip(weights, *planes, strict=True)):
        for plane, activation in enumerate(activations):
            number = quad % 2 if single else plane
            sums[number] = _add_products(sums[number], weight, activation)
    return T.Bind(sums[0] + sums[1]) if single else sum_planes(sums)


def _add_products(total: Expr, weight: Expr, activation: Expr) -> Expr:
    return T.Bind(
        intrinsic(
            "int32x16",
            "llvm.x86.avx512.vpdpbusd.512",
            total,
            T.reinterpret("int8x64", weight),
            T.reinterpret("int8x64", broadcast(activation, LANES)),
        )
    )


def add_pairs(total: Expr, a: Expr, b: Expr) -> Expr:
    """vpdpwssd, which LLVM splits in two without the attribute fast-dpwssd."""
    return T.Bind(intrinsic("int32x16", "llvm.x86.avx512.vpdpwssd.512", total, a, b))


AVX512VNNI = Isa(
    name="avx512vnni",
    target={
        "kind": "llvm",
        "mtriple": "x86_64-linux-gnu",
        "mcpu": "x86-64-v4",
        "mattr": ["+avx512vnni", "+fast-dpwssd"],
    },
    lanes=LANES,
    cpu_features=(
        *AVX2.cpu_features,
        "avx512bw",
        "avx512cd",
        "avx512dq",
        "avx512f",
        "avx512vl",
        "avx512_vnni",
    ),
    dot_group=dot_group,
    half_to_float=half_to_float,
    add_pairs=add_pairs,
)
