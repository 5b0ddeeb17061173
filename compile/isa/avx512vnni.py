"""x86-64 with AVX-512 VNNI: Ice Lake, Zen 4 and later."""

from collections.abc import Sequence

from emberd.compile.isa.avx2 import AVX2, half_to_float
from emberd.compile.isa.definition import Isa
from emberd.compile.isa.vector import Expr, broadcast, intrinsic
from tvm.script import tirx as T  # noqa: N812

LANES = 16


def dot_group(
    zero_point: int, weights: Sequence[Expr], activations: Sequence[Expr], activation_sum: Expr
) -> Expr:
    """vpdpbusd on the unsigned weights; their zero point enters as -zero_point * sum(x).

    Two chains halve the latency of the accumulation.
    """
    chains = [
        T.Bind(broadcast(activation_sum * T.int32(-zero_point), LANES)),
        T.Bind(broadcast(T.int32(0), LANES)),
    ]
    for j, (weight, activation) in enumerate(zip(weights, activations, strict=True)):
        chains[j % 2] = T.Bind(
            intrinsic(
                "int32x16",
                "llvm.x86.avx512.vpdpbusd.512",
                chains[j % 2],
                T.reinterpret("int8x64", weight),
                T.reinterpret("int8x64", broadcast(activation, LANES)),
            )
        )
    return T.Bind(chains[0] + chains[1])


AVX512VNNI = Isa(
    name="avx512vnni",
    target={
        "kind": "llvm",
        "mtriple": "x86_64-linux-gnu",
        "mcpu": "x86-64-v4",
        "mattr": ["+avx512vnni"],
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
)
