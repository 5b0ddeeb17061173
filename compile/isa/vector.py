"""Explicit-vector TIR: a thin layer over TVM's IRBuilder that kernels and ISAs share.

A vector is a TIR expression whose type has lanes ("float32x16"). LLVM splits a vector that is wider
than the machine's, so every function here works on every ISA; what differs is in the Isa objects.
Nothing here becomes a call of a maths function: kernels are loaded without TVM's runtime, and may
count on the C library alone.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tvm.script import tirx as T  # noqa: N812
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder.tirx import prim_func
from tvm.tirx import Shuffle

Buffer = Any
Expr = Any
PrimFunc = Any

# Adding 1.5 * 2^23 leaves round-to-nearest-even(x) in the low mantissa bits for |x| < 2^22.
_ROUNDING_MAGIC = 12582912.0
_ROUNDING_MAGIC_BITS = 0x4B400000


@contextmanager
def kernel(name: str) -> Iterator[IRBuilder]:
    """Frame of a PrimFunc `name`: declare its arguments, then `with T.sblock("root")` the body.

    Its result is `builder.get()` once the frame is closed. Buffers must not alias.
    """
    with IRBuilder() as builder, prim_func(s_tir=True):
        T.func_name(name)
        T.func_attr({"global_symbol": name, "tirx.noalias": True})
        yield builder


def vector_type(dtype: str, lanes: int) -> str:
    """TVM's name of a vector type, e.g. float32x16; a scalar for lanes = 1."""
    return dtype if lanes == 1 else f"{dtype}x{lanes}"


def type_of(value: Expr) -> tuple[str, int]:
    """Element dtype and lanes of an expression."""
    dtype, _, lanes = str(value.ty).partition("x")
    return dtype, int(lanes or 1)


def broadcast(value: Expr, lanes: int) -> Expr:
    """The scalar in every lane."""
    return value if lanes == 1 else T.broadcast(value, lanes)


def constant(value: float, lanes: int) -> Expr:
    """A float32 constant in every lane."""
    return broadcast(T.float32(value), lanes)


def load(buffer: Buffer, indices: Sequence[Expr | int], lanes: int) -> Expr:
    """`lanes` consecutive elements, the first one at `indices`, bound to a variable."""
    return T.Bind(buffer.vload(list(indices), vector_type(str(buffer.dtype), lanes)))


def store(buffer: Buffer, value: Expr, indices: Sequence[Expr | int]) -> None:
    """Stores the vector (or scalar) in consecutive elements, the first one at `indices`."""
    lanes = type_of(value)[1]
    last = indices[-1] if lanes == 1 else T.ramp(indices[-1], 1, lanes)
    T.buffer_store(buffer, value, [*indices[:-1], last])


def prefetch(buffer: Buffer, indices: Sequence[Expr | int], *, write: bool = False) -> None:
    """Asks for the element in the second-level cache, or in the first to `write` it.

    An address outside the buffer is harmless.
    """
    level = T.int32(3 if write else 2)
    address = T.address_of(buffer[tuple(indices)])
    data = T.int32(1)
    T.evaluate(T.call_llvm_intrin("", "llvm.prefetch", address, T.int32(write), level, data))


def stack_buffer(count: int, dtype: str = "float32") -> Buffer:
    """Uninitialised array of `count` elements on the task's stack: less than 1024 bytes.

    TVM would turn a larger one into a workspace call.
    """
    return T.alloc_buffer((count,), dtype, scope="global")


def for_block(index: Expr, total: int, size: int, body: Callable[[int], None]) -> None:
    """Emits body(count) for block `index` of a dimension `total` that is cut into blocks of `size`.

    The count is `size`, or what is left of the dimension for the last block.
    """
    whole, rest = divmod(total, size)
    if not rest:
        body(size)
    elif not whole:
        body(rest)
    else:
        with T.If(index < whole):
            with T.Then():
                body(size)
            with T.Else():
                body(rest)


def for_vectors(total: int, lanes: int, body: Callable[[Expr, int], None]) -> None:
    """Emits body(first, count) over a dimension: whole vectors, then what is left one by one."""
    whole = total // lanes * lanes
    with T.serial(0, whole // lanes) as step:
        body(step * lanes, lanes)
    with T.serial(whole, total) as element:
        body(element, 1)


def intrinsic(dtype: str, name: str, *arguments: Expr) -> Expr:
    """Call of a pure LLVM intrinsic."""
    return T.call_llvm_pure_intrin(dtype, name, *arguments)


def multiply_add(a: Expr, b: Expr, c: Expr) -> Expr:
    """a * b + c, fused into one rounding where the ISA can."""
    return T.Bind(intrinsic(str(a.ty), "llvm.fmuladd", a, b, c))


def absolute(value: Expr) -> Expr:
    """|value| of floats."""
    return intrinsic(str(value.ty), "llvm.fabs", value)


def rounded(value: Expr) -> Expr:
    """`value` in the precision of its type: LLVM must not fuse its last operation with the next."""
    return T.Bind(intrinsic(str(value.ty), "llvm.arithmetic.fence", value))


def round_to_int(value: Expr) -> Expr:
    """float32 -> int32, to nearest even, for |value| < 2^22; the same on every ISA."""
    lanes = type_of(value)[1]
    shifted = T.reinterpret(vector_type("int32", lanes), value + constant(_ROUNDING_MAGIC, lanes))
    return T.Bind(shifted - broadcast(T.int32(_ROUNDING_MAGIC_BITS), lanes))


def halves(value: Expr) -> tuple[Expr, Expr]:
    """The lower and the upper half of a vector's lanes."""
    dtype, lanes = type_of(value)
    value = T.Bind(value)
    if lanes == 2:
        return Shuffle([value], [0]), Shuffle([value], [1])
    half = vector_type(dtype, lanes // 2)
    return T.vectorlow(half, value), T.vectorhigh(half, value)


def sum_lanes(value: Expr) -> Expr:
    """Sum of the lanes (a power of two); of floats pairwise, lane i with lane i + lanes/2 first."""
    dtype, lanes = type_of(value)
    if dtype != "float32":
        return T.Bind(intrinsic(dtype, "llvm.vector.reduce.add", value))
    while lanes > 1:
        low, high = halves(value)
        value, lanes = low + high, lanes // 2
    return T.Bind(value)


def max_lanes(value: Expr) -> Expr:
    """Largest lane. An intrinsic, as TVM's simplifier expands nested max exponentially."""
    dtype = type_of(value)[0]
    name = "llvm.vector.reduce.fmax" if dtype == "float32" else "llvm.vector.reduce.smax"
    return T.Bind(intrinsic(dtype, name, value))
