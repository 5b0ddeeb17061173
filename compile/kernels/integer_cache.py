"""A cache of keys and values as integers with a scale for each vector.

Products of int16 pairs are summed in int32, exactly and in any order, so scales are such that no
sum leaves int32:

- Keys and queries are scaled to a Euclidean norm of at most `NORM`, so that their product fits
  (Cauchy-Schwarz). Of 256 elements a typical one then has 11 to 12 bits, like float16.
- Values have up to 14 bits; their weights take what int32 leaves of a split (integer_attention).
- A cache of 8 bits holds keys and values in -127..127, whatever their norm.

The cache holds chunks of `CHUNK` positions of one head, in the order in which products take them:
keys [D / 2, CHUNK, 2], values [D / CHUNK, CHUNK / 2, CHUNK, 2], where D is padded to a multiple of
CHUNK with whatever is there, and then CHUNK scales float32.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from emberd.compile.isa.isa import Isa
from emberd.compile.isa.math import Register, lane, max_modulo
from emberd.compile.isa.vector import (
    Expr,
    absolute,
    broadcast,
    constant,
    intrinsic,
    load,
    prefetch,
    round_to_int,
    store,
    sum_lanes,
    type_of,
    vector_type,
)
from emberd.compile.kernels.dimensions import vector_lanes
from numpy.typing import NDArray
from tvm.script import tirx as T  # noqa: N812
from tvm.tirx import Shuffle

CHUNK = 16  # positions that are stored together
LARGEST = 32767.0
NORM = 46000.0  # squared, with half a unit of rounding in each element, below 2^31
KEY_LIMIT = {8: 127.0, 16: LARGEST}
VALUE_LIMIT = {8: 127.0, 16: 8191.0}

_SMALLEST = 1e-20  # stands for the largest of a vector of zeros
_LINE_BYTES = 64

Kind = Literal["query", "key", "value"]


def reference(x: NDArray[np.float64], *, bits: int, kind: Kind) -> NDArray[np.float64]:
    """Vectors x [..., D] as their integers times their scales; queries have 16 bits always."""
    largest = np.maximum(np.abs(x).max(-1, keepdims=True), _SMALLEST)
    if kind == "value":
        factor = VALUE_LIMIT[bits] / largest
    else:
        norm = np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), _SMALLEST)
        limit = KEY_LIMIT[bits] if kind == "key" else LARGEST
        factor = np.minimum(limit / largest, NORM / norm)
    return np.asarray(np.rint(x * factor) / factor)


def padded(head_dim: int) -> int:
    """Elements of a vector in the cache."""
    return -(-head_dim // CHUNK) * CHUNK


def row_elements(head_dim: int, bits: int) -> int:
    """Elements of the cache for each position and head: the vector, padded, and its scale."""
    return padded(head_dim) + 32 // bits


class IntegerCache:
    """The keys or the values of a kernel: int8 or int16 [capacity, Hkv, row_elements]."""

    def __init__(self, isa: Isa, buffer: Expr, head_dim: int, bits: int) -> None:
        capacity, self._heads, elements = buffer.shape
        self._isa, self._bits, self._head_dim = isa, bits, head_dim
        self._lanes = vector_lanes(isa, head_dim)
        self._buffer = T.decl_buffer(
            (capacity * self._heads * elements,), f"int{bits}", data=buffer.data
        )
        self.chunk_elements = CHUNK * int(elements)

    def chunk(self, block: Expr, head: Expr) -> Expr:
        """Where the chunk of a head begins, of the block of CHUNK positions."""
        block = T.Cast("int64", block)
        return T.Bind((block * self._heads + head) * self.chunk_elements)

    def later(self, blocks: int) -> int:
        """From a place in a chunk to that of the same head so many blocks further on."""
        return blocks * int(self._heads) * self.chunk_elements

    def pairs(self, at: Expr) -> Expr:
        """int16 x 2 lanes: a pair of elements of as many positions or dimensions."""
        vector = load(self._buffer, [at], 2 * self._isa.lanes)
        if self._bits == 16:
            return vector
        return T.Bind(T.Cast(vector_type("int16", 2 * self._isa.lanes), vector))

    def scales(self, chunk: Expr, place: Expr) -> Expr:
        """float32 x lanes: the scales of the positions from `place` of a chunk on."""
        lanes, ratio = self._isa.lanes, 32 // self._bits
        stored = load(self._buffer, [self._scale_at(chunk, place)], ratio * lanes)
        return T.Bind(T.reinterpret(vector_type("float32", lanes), stored))

    def fetch(self, at: Expr) -> None:
        """Ask for the cache line of an element."""
        prefetch(self._buffer, [at])

    def fetch_all(self, first: Expr, elements: int) -> None:
        """Ask for all cache lines of elements that begin with a line."""
        step = _LINE_BYTES * 8 // self._bits
        with T.serial(0, elements // step) as line:
            prefetch(self._buffer, [first + line * step])

    def append_key(self, key: Expr, token: Expr, head: Expr, position: Expr) -> None:
        """Write the key [T, Hkv, D] of one token and head."""
        factor = norm_factor(key, token, head, KEY_LIMIT[self._bits], self._lanes)
        chunk, place = self.chunk(position // CHUNK, head), T.Bind(position % CHUNK)
        together = math.gcd(2, self._lanes)
        with T.serial(0, self._head_dim // self._lanes) as part:
            first = T.Bind(part * self._lanes)
            integers = self._integers(load(key, [token, head, first], self._lanes), factor)
            for i in range(0, self._lanes, together):
                pair, half = (first + i) // 2, (first + i) % 2
                at = chunk + (pair * CHUNK + place) * 2 + half
                picked = lane(integers, i) if together == 1 else Shuffle([integers], [i, i + 1])
                store(self._buffer, T.Bind(picked), [at])
        self._store_scale(factor, chunk, place)

    def append_value(self, value: Expr, token: Expr, head: Expr, position: Expr) -> None:
        """Write the value [T, Hkv, D] of one token and head."""
        limit = T.float32(VALUE_LIMIT[self._bits])
        factor = T.Bind(limit / _largest(value, token, head, self._lanes))
        chunk, place = self.chunk(position // CHUNK, head), T.Bind(position % CHUNK)
        with T.serial(0, self._head_dim // self._lanes) as part:
            first = T.Bind(part * self._lanes)
            integers = self._integers(load(value, [token, head, first], self._lanes), factor)
            rows = T.Bind(first // CHUNK * (CHUNK // 2) + place // 2)
            for i in range(self._lanes):
                at = chunk + (rows * CHUNK + (first + i) % CHUNK) * 2 + place % 2
                store(self._buffer, lane(integers, i), [at])
        self._store_scale(factor, chunk, place)

    def _integers(self, x: Expr, factor: Expr) -> Expr:
        integers = rounded_product(x, factor)
        return T.Bind(T.Cast(vector_type(f"int{self._bits}", self._lanes), integers))

    def _store_scale(self, factor: Expr, chunk: Expr, place: Expr) -> None:
        scale = T.reinterpret(
            vector_type(f"int{self._bits}", 32 // self._bits), T.float32(1.0) / factor
        )
        store(self._buffer, T.Bind(scale), [self._scale_at(chunk, place)])

    def _scale_at(self, chunk: Expr, place: Expr) -> Expr:
        return T.Bind(chunk + CHUNK * padded(self._head_dim) + place * (32 // self._bits))


def norm_factor(x: Expr, token: Expr, head: Expr, limit: float, lanes: int) -> Expr:
    """What x[token, head] is multiplied with: its elements are then at most `limit`, its norm is at
    most `NORM`."""
    scale = T.Bind(T.float32(limit) / _largest(x, token, head, lanes))
    squares = Register(constant(0.0, lanes))
    with T.serial(0, int(x.shape[2]) // lanes) as part:
        scaled = load(x, [token, head, part * lanes], lanes) * broadcast(scale, lanes)
        scaled = T.Bind(scaled)
        squares.add_product(scaled, scaled)
    norm = T.Bind(intrinsic("float32", "llvm.sqrt", sum_lanes(squares.value)))
    return T.Bind(scale * T.min(T.Bind(T.float32(NORM) / norm), T.float32(1.0)))


def rounded_product(x: Expr, factor: Expr) -> Expr:
    """x times a scalar, as int32."""
    return round_to_int(T.Bind(x * broadcast(factor, type_of(x)[1])))


def largest_lane(register: Register) -> Expr:
    """Of a vector of float32."""
    return lane(max_modulo(register.value, 1), 0)


def _largest(x: Expr, token: Expr, head: Expr, lanes: int) -> Expr:
    """The largest absolute element of x[token, head]."""
    largest = Register(constant(_SMALLEST, lanes))
    with T.serial(0, int(x.shape[2]) // lanes) as part:
        largest.set(T.max(largest.value, absolute(load(x, [token, head, part * lanes], lanes))))
    return largest_lane(largest)
