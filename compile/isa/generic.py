"""Any x86-64: SSE2 only. Correct everywhere, not tuned."""

from collections.abc import Sequence

from emberd.compile.isa.definition import Isa
from emberd.compile.isa.vector import Expr, broadcast, intrinsic, type_of, vector_type
from tvm.script import tirx as T  # noqa: N812

LANES = 4


def _split(quads: Expr) -> tuple[Expr, Expr]:
    """int8 quadruples in int32 x 4 -> their even and their odd bytes as int16 x 8."""
    words = T.Bind(T.reinterpret("int16x8", quads))
    eight = T.broadcast(T.int16(8), 8)
    return (
        T.Bind(T.shift_right(T.shift_left(words, eight), eight)),
        T.Bind(T.shift_right(words, eight)),
    )


def dot_group(
    zero_point: int, weights: Sequence[Expr], activations: Sequence[Expr], activation_sum: Expr
) -> Expr:
    """pmaddwd on bytes widened to int16; the zero point is subtracted from the weights first."""
    total = None
    for weight, activation in zip(weights, activations, strict=True):
        signed = T.reinterpret("int8x16", weight - T.broadcast(T.uint8(zero_point), 16))
        x = _split(broadcast(activation, LANES))
        for w_words, x_words in zip(_split(signed), x, strict=True):
            pairs = intrinsic("int32x4", "llvm.x86.sse2.pmadd.wd", w_words, x_words)
            total = T.Bind(pairs if total is None else total + pairs)
    return total


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


GENERIC = Isa(
    name="generic",
    target={"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "x86-64"},
    lanes=LANES,
    cpu_features=("sse2",),
    dot_group=dot_group,
    half_to_float=half_to_float,
)
