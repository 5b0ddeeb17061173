"""Elementary functions and reductions of f32 vectors, written as TIR.

Every product that is added to something goes through `multiply_add`, so that it is fused where this
file says so and never at LLVM's discretion: that is what makes a kernel for one token and a kernel
for many tokens agree to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from emberd.compile.isa.vector import (
    Expr,
    absolute,
    broadcast,
    constant,
    intrinsic,
    load,
    multiply_add,
    stack_buffer,
    store,
    type_of,
    vector_type,
)
from tvm.script import tirx as T  # noqa: N812
from tvm.tirx import Shuffle

LOWEST = -3.0e38
"""Stands for minus infinity in running maxima: differences of two such stay free of NaN."""

_LOG2_E = 1.4426950408889634
_LN_2_HIGH = 0.693359375  # few bits, so that n * _LN_2_HIGH is exact for every exponent n
_LN_2_LOW = -2.12194440e-4
_ROUND = 12582912.0  # 1.5 * 2^23: adding it leaves the nearest integer in the low mantissa bits
_EXP_MIN = -87.33654  # below, e^x is not a normal number
_EXP_MAX = 88.37626  # above, the power of two would need two factors
_EXP_COEFFICIENTS = (  # (e^r - 1 - r) / r^2 for |r| <= ln(2) / 2, minimax (Cephes expf)
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)
_ATANH_COEFFICIENTS = tuple(2.0 / power for power in range(15, 0, -2))  # of 2 atanh(s) / s in s^2


class Register:
    """A vector variable. LLVM keeps it in a register: it is a stack array of one vector."""

    def __init__(self, initial: Expr) -> None:
        dtype, self._lanes = type_of(initial)
        self._buffer = stack_buffer(self._lanes, dtype)
        self.set(initial)

    @property
    def value(self) -> Expr:
        return load(self._buffer, [0], self._lanes)

    def set(self, value: Expr) -> None:
        store(self._buffer, value, [0])

    def add_product(self, a: Expr, b: Expr) -> None:
        """Adds a * b."""
        self.set(multiply_add(a, b, self.value))


def pinned(value: Expr) -> Expr:
    """The same value, which TVM cannot substitute into its uses.

    TVM's simplifier puts the definition of a bound variable in place of every use, so that chains
    of expressions that use their operands twice grow exponentially. It leaves memory alone.
    """
    return Register(value).value


def computed(value: Expr) -> Expr:
    """The same number, as a sum with zero (which makes -0 +0).

    LLVM turns a loop that only copies into a call of memcpy, and kernels must not need a C library.
    """
    lanes = type_of(value)[1]
    return multiply_add(value, constant(1.0, lanes), constant(0.0, lanes))


def polynomial(x: Expr, coefficients: Sequence[float]) -> Expr:
    """Horner's rule; coefficients from the highest power down."""
    lanes = type_of(x)[1]
    value = constant(coefficients[0], lanes)
    for coefficient in coefficients[1:]:
        value = multiply_add(value, x, constant(coefficient, lanes))
    return value


def exp(x: Expr) -> Expr:
    """e^x within 2e-7 (relative) from -87.33 to 88.37; 0 below, infinity above."""
    lanes = type_of(x)[1]
    x = pinned(x)
    clamped = pinned(T.max(T.min(x, constant(_EXP_MAX, lanes)), constant(_EXP_MIN, lanes)))
    shifted = pinned(multiply_add(clamped, constant(_LOG2_E, lanes), constant(_ROUND, lanes)))
    exponent = T.Bind(shifted - constant(_ROUND, lanes))
    r = multiply_add(exponent, constant(-_LN_2_HIGH, lanes), clamped)
    r = pinned(multiply_add(exponent, constant(-_LN_2_LOW, lanes), r))
    tail = multiply_add(T.Bind(polynomial(r, _EXP_COEFFICIENTS) * r), r, r)
    integers = vector_type("int32", lanes)
    bits = T.reinterpret(integers, shifted) + broadcast(T.int32(127), lanes)
    power = T.reinterpret(
        vector_type("float32", lanes), T.shift_left(bits, broadcast(T.int32(23), lanes))
    )
    value = T.Bind((tail + constant(1.0, lanes)) * power)
    value = T.Select(x > constant(_EXP_MAX, lanes), constant(math.inf, lanes), value)
    return pinned(T.Select(x < constant(_EXP_MIN, lanes), constant(0.0, lanes), value))


def sigmoid(x: Expr) -> Expr:
    """1 / (1 + e^-x)."""
    one = constant(1.0, type_of(x)[1])
    return T.Bind(one / (one + exp(negate(x))))


def silu(x: Expr) -> Expr:
    """x * sigmoid(x)."""
    return T.Bind(x / (constant(1.0, type_of(x)[1]) + exp(negate(x))))


def softplus(x: Expr) -> Expr:
    """log(1 + e^x) = max(x, 0) + log1p(e^-|x|), where log1p(u) = 2 atanh(u / (2 + u)).

    u is in (0, 1], so the argument of atanh is at most 1/3 and its series is short. Above 20, where
    the reference implementation returns x itself, the second term is less than the rounding.
    """
    lanes = type_of(x)[1]
    u = exp(negate(absolute(x)))
    s = pinned(u / (u + constant(2.0, lanes)))
    series = polynomial(T.Bind(s * s), _ATANH_COEFFICIENTS)
    return pinned(multiply_add(series, s, T.max(x, constant(0.0, lanes))))


def negate(x: Expr) -> Expr:
    """-x."""
    return T.Bind(constant(0.0, type_of(x)[1]) - x)


def reciprocal_sqrt(x: Expr) -> Expr:
    """1 / sqrt(x), both rounded exactly."""
    return T.Bind(constant(1.0, type_of(x)[1]) / intrinsic(str(x.ty), "llvm.sqrt", x))


def cos(x: Expr) -> Expr:
    """libm's cosf of every lane."""
    return T.Bind(intrinsic(str(x.ty), "llvm.cos", x))


def sin(x: Expr) -> Expr:
    """libm's sinf of every lane."""
    return T.Bind(intrinsic(str(x.ty), "llvm.sin", x))


def lane(vector: Expr, index: int) -> Expr:
    """One lane as a scalar."""
    return vector if type_of(vector)[1] == 1 else T.Bind(Shuffle([vector], [index]))


def first_lanes(vector: Expr, count: int) -> Expr:
    """The first `count` lanes."""
    if type_of(vector)[1] == count:
        return vector
    return T.Bind(Shuffle([vector], list(range(count))))


def lane_numbers(lanes: int) -> Expr:
    """0, 1, 2, ... as int32."""
    return T.int32(0) if lanes == 1 else T.ramp(T.int32(0), 1, lanes)


def sum_each(vectors: Sequence[Expr]) -> Expr:
    """One vector whose lane i is the sum of the lanes of vectors[i]; takes n vectors of n lanes."""
    n = len(vectors)
    even, odd = list(range(0, 2 * n, 2)), list(range(1, 2 * n, 2))
    while len(vectors) > 1:
        vectors = [
            pinned(Shuffle([a, b], even) + Shuffle([a, b], odd))
            for a, b in zip(vectors[::2], vectors[1::2], strict=True)
        ]
    return vectors[0]


def max_modulo(x: Expr, period: int) -> Expr:
    """In every lane the maximum over the lanes whose number is the same modulo `period`."""
    return _fold(x, period, T.max)


def sum_modulo(x: Expr, period: int) -> Expr:
    """In every lane the sum over the lanes whose number is the same modulo `period`."""
    return _fold(x, period, lambda a, b: a + b)


def _fold(x: Expr, period: int, combine: Callable[[Expr, Expr], Expr]) -> Expr:
    lanes = type_of(x)[1]
    step = lanes // 2
    while step >= period:
        rotated = Shuffle([x], [(i + step) % lanes for i in range(lanes)])
        x = pinned(combine(x, rotated))
        step //= 2
    return x
