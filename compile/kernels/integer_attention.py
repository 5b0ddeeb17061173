"""Causal grouped-query attention over a cache of integers (integer_cache).

Keys, values, queries and softmax weights are integers, so that both products run on the instruction
that multiplies int16 and adds pairs: twice the arithmetic of float32, nothing to convert, and sums
that are exact in any order. The scale of a value goes into its weight; the weights of a split are
scaled to 15 bits, or to fewer where their sum times the largest value would leave int32.

The order of splits, and what the result does not depend on: see attention_splits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from emberd.compile.isa.isa import Isa
from emberd.compile.isa.math import LOWEST, Register, exp, lane_numbers
from emberd.compile.isa.vector import (
    Expr,
    PrimFunc,
    broadcast,
    constant,
    kernel,
    load,
    store,
    sum_lanes,
    vector_type,
)
from emberd.compile.kernels.attention_splits import (
    SLOTS,
    SPLIT,
    Splits,
    attend_from_many_tokens,
    attend_from_one_token,
    splits_scratch,
)
from emberd.compile.kernels.dimensions import Scratch, dimension, token_suffix, vector_lanes
from emberd.compile.kernels.integer_cache import (
    CHUNK,
    LARGEST,
    VALUE_LIMIT,
    IntegerCache,
    largest_lane,
    norm_factor,
    padded,
    rounded_product,
    row_elements,
)
from tvm.script import tirx as T  # noqa: N812

_STEP = 2 * CHUNK  # positions that are read at a time
_AHEAD = 4  # steps over columns whose values are fetched ahead


def integer_attention(
    isa: Isa, *, query_heads: int, kv_heads: int, head_dim: int, bits: int, tokens: int | None
) -> PrimFunc:
    """query f32[T, Hq, D], key f32[T, Hkv, D], value f32[T, Hkv, D], positions i32[T]; key_cache
    and value_cache of int8 or int16 [capacity, Hkv, row_elements] in place -> out f32[T, Hq * D];
    scratch: see `integer_attention_scratch`.

    positions increase by one from token to token and are below the capacity, a multiple of 32.
    """
    name = f"integer_attention_i{bits}_hq{query_heads}_hkv{kv_heads}_d{head_dim}"
    with kernel(f"{name}_{token_suffix(tokens)}") as builder:
        rows, width = dimension("tokens", tokens), padded(head_dim)
        cache_shape = (dimension("capacity"), kv_heads, row_elements(head_dim, bits))
        query = T.arg("query", T.buffer((rows, query_heads, head_dim), "float32"))
        key = T.arg("key", T.buffer((rows, kv_heads, head_dim), "float32"))
        value = T.arg("value", T.buffer((rows, kv_heads, head_dim), "float32"))
        positions = T.arg("positions", T.buffer((rows,), "int32"))
        key_cache = T.arg("key_cache", T.buffer(cache_shape, f"int{bits}"))
        value_cache = T.arg("value_cache", T.buffer(cache_shape, f"int{bits}"))
        out = T.arg("out", T.buffer((rows, query_heads * head_dim), "float32"))
        queries = T.arg("queries", T.buffer((rows, query_heads, width), "int16"))
        query_scales = T.arg("query_scales", T.buffer((rows, query_heads), "float32"))
        scores = T.arg("scores", T.buffer((SLOTS, query_heads, SPLIT), "float32"))
        weights = T.arg("weights", T.buffer((SLOTS, query_heads, SPLIT), "int16"))
        partial = T.arg("partial", T.buffer((SLOTS, query_heads, width), "float32"))
        of_split = T.arg("of_split", T.buffer((SLOTS, query_heads, 2), "float32"))
        merged = T.arg("merged", T.buffer((rows, query_heads, 2), "float32"))
        with T.sblock("root"):
            keys = IntegerCache(isa, key_cache, head_dim, bits)
            values = IntegerCache(isa, value_cache, head_dim, bits)
            splits = Splits(isa, head_dim, out, partial, of_split, merged)
            attention = _Attention(
                isa=isa,
                group=query_heads // kv_heads,
                width=width,
                value_limit=VALUE_LIMIT[bits],
                from_memory=tokens == 1,
                keys=keys,
                values=values,
                queries=queries,
                query_scales=query_scales,
                scores=scores,
                weights=weights,
                splits=splits,
            )
            with T.parallel(0, rows) as token:
                position = T.Bind(T.Cast("int64", positions[token]))
                with T.serial(0, kv_heads) as head:
                    keys.append_key(key, token, head, position)
                    values.append_value(value, token, head, position)
                with T.serial(0, query_heads) as head:
                    attention.quantise_query(query, token, head)
                    splits.begin(token, head)
            heads = (query_heads, kv_heads)
            if tokens == 1:
                attend_from_one_token(attention.attend, splits, positions, *heads)
            else:
                attend_from_many_tokens(attention.attend, splits, positions, rows, *heads)
    return builder.get()


def integer_attention_scratch(
    tokens: int, *, query_heads: int, kv_heads: int, head_dim: int, bits: int
) -> Scratch:
    """queries [T, Hq, W]: integers, W is D padded; query_scales [T, Hq], 1 / sqrt(D) among them;
    scores and weights [SLOTS, Hq, SPLIT] of the splits under way; then `splits_scratch`."""
    width = padded(head_dim)
    return [
        ("int16", (tokens, query_heads, width)),
        ("float32", (tokens, query_heads)),
        ("float32", (SLOTS, query_heads, SPLIT)),
        ("int16", (SLOTS, query_heads, SPLIT)),
        *splits_scratch(tokens, query_heads, width),
    ]


@dataclass(frozen=True)
class _Attention:
    """The buffers of one kernel, and the steps of a split.

    `from_memory`: whether keys and values come from there, or for most tokens from a cache.
    """

    isa: Isa
    group: int  # query heads for each key head
    width: int
    value_limit: float
    from_memory: bool
    keys: IntegerCache
    values: IntegerCache
    queries: Expr
    query_scales: Expr
    scores: Expr
    weights: Expr
    splits: Splits

    @property
    def tile(self) -> int:
        """Query heads computed together: with two vectors of sums each they fill the registers."""
        most = 8 if self.isa.lanes >= 16 else 4
        return max(size for size in range(1, most + 1) if self.group % size == 0)

    @property
    def parts(self) -> int:
        """Vectors that hold one element of all the positions in a chunk."""
        return CHUNK // self.isa.lanes

    def quantise_query(self, query: Expr, token: Expr, head: Expr) -> None:
        """The integers of a query, and its scale."""
        head_dim = int(query.shape[2])
        lanes = vector_lanes(self.isa, head_dim)
        factor = norm_factor(query, token, head, LARGEST, lanes)
        with T.serial(0, head_dim // lanes) as part:
            at = [token, head, part * lanes]
            integers = rounded_product(load(query, at, lanes), factor)
            store(self.queries, T.Cast(vector_type("int16", lanes), integers), at)
        with T.serial(head_dim, self.width) as padding:
            store(self.queries, T.int16(0), [token, head, padding])
        store(self.query_scales, T.float32(1.0 / math.sqrt(head_dim)) / factor, [token, head])

    def attend(self, token: Expr, kv_head: Expr, split: Expr, position: Expr, slot: Expr) -> None:
        """See attention_splits.Attend."""
        first_block = T.Bind(split * (SPLIT // CHUNK))
        length = T.Bind(T.Cast("int32", T.min(position + 1 - split * SPLIT, SPLIT)))
        with T.serial(0, self.group // self.tile) as tile:
            heads = T.Bind(kv_head * self.group + tile * self.tile)
            self._score(token, kv_head, heads, first_block, length, slot)
            with T.serial(0, self.tile) as number:
                self._weigh(kv_head, heads, number, first_block, length, slot)
            self._accumulate(kv_head, heads, first_block, length, slot)

    def _score(
        self, token: Expr, kv_head: Expr, heads: Expr, first_block: Expr, length: Expr, slot: Expr
    ) -> None:
        """Scaled products of queries and keys, LOWEST beyond `length`; and their maximum."""
        lanes = self.isa.lanes
        largest = [Register(constant(LOWEST, lanes)) for _ in range(self.tile)]
        with T.serial(0, _steps(length) * self.parts) as step:
            vectors = [T.Bind(step * 2 + i) for i in range(2)]
            chunks = [self.keys.chunk(first_block + v // self.parts, kv_head) for v in vectors]
            places = [T.Bind(v % self.parts * lanes) for v in vectors]
            sums = self._sums(2)
            with T.serial(0, self.width // 2) as pair:
                keys = []
                for chunk, place in zip(chunks, places, strict=True):
                    at = T.Bind(chunk + (pair * CHUNK + place) * 2)
                    if self.from_memory:
                        # The chunks of a head are not adjacent: hardware does not foresee them.
                        self.keys.fetch(at + self.keys.later(2))
                    keys.append(self.keys.pairs(at))
                for head, row in enumerate(sums):
                    words = load(self.queries, [token, heads + head, pair * 2], 2)
                    self._add_products(row, keys, words)
            for i, (chunk, place) in enumerate(zip(chunks, places, strict=True)):
                scales = self.keys.scales(chunk, place)
                first = T.Bind(vectors[i] * lanes)
                valid = _below(first, length, lanes)
                for head, row in enumerate(sums):
                    factor = load(self.query_scales, [token, heads + head], 1)
                    scale = T.Bind(scales * broadcast(factor, lanes))
                    product = T.Bind(T.Cast(vector_type("float32", lanes), row[i].value) * scale)
                    score = T.Bind(T.Select(valid, product, constant(LOWEST, lanes)))
                    largest[head].set(T.max(largest[head].value, score))
                    store(self.scores, score, [slot, heads + head, first])
        for head, register in enumerate(largest):
            store(self.splits.of_split, largest_lane(register), [slot, heads + head, 0])

    def _weigh(
        self,
        kv_head: Expr,
        heads: Expr,
        number: Expr,
        first_block: Expr,
        length: Expr,
        slot: Expr,
    ) -> None:
        """Scores become the integers that values are multiplied with; the first score becomes the
        scale of the sums."""
        lanes, head = self.isa.lanes, T.Bind(heads + number)
        vectors = T.Bind(_steps(length) * (2 * self.parts))
        maximum = broadcast(load(self.splits.of_split, [slot, head, 0], 1), lanes)
        total, scaled_total, largest = (Register(constant(0.0, lanes)) for _ in range(3))
        with T.serial(0, vectors) as vector:
            first = T.Bind(vector * lanes)
            weight = exp(load(self.scores, [slot, head, first], lanes) - maximum)
            total.set(total.value + weight)
            chunk = self.values.chunk(first_block + vector // self.parts, kv_head)
            if self.from_memory:  # which would rest meanwhile
                share = self._ahead // self.tile
                self.values.fetch_all(chunk + number * share, share)
            scaled = T.Bind(self.values.scales(chunk, vector % self.parts * lanes) * weight)
            # What lies beyond the length may be anything, NaN as well.
            valid = _below(first, length, lanes)
            scaled = T.Bind(T.Select(valid, scaled, constant(0.0, lanes)))
            store(self.scores, scaled, [slot, head, first])
            scaled_total.set(scaled_total.value + scaled)
            largest.set(T.max(largest.value, scaled))
        store(self.splits.of_split, sum_lanes(total.value), [slot, head, 1])
        sum_before = T.Bind(sum_lanes(scaled_total.value))
        most = T.float32((2**31 - 1) / self.value_limit - SPLIT)  # of the sum of integers
        by_largest = T.Bind(T.float32(LARGEST) / largest_lane(largest))
        factor = T.Bind(T.min(by_largest, T.Bind(most / sum_before)))
        sum_after = Register(broadcast(T.int32(0), lanes))
        with T.serial(0, vectors) as vector:
            at = [slot, head, vector * lanes]
            integers = rounded_product(load(self.scores, at, lanes), factor)
            sum_after.set(sum_after.value + integers)
            store(self.weights, T.Cast(vector_type("int16", lanes), integers), at)
        # Equal weights are all rounded the same way: their sum tells how far.
        scale = sum_before / T.Cast("float32", sum_lanes(sum_after.value))
        store(self.scores, scale, [slot, head, 0])

    def _accumulate(
        self, kv_head: Expr, heads: Expr, first_block: Expr, length: Expr, slot: Expr
    ) -> None:
        """partial = weights * values."""
        lanes, columns = self.isa.lanes, self._columns
        with T.serial(0, self.width // (lanes * columns)) as step:
            vectors = [T.Bind(step * columns + i) for i in range(columns)]
            sums = self._sums(columns)
            with T.serial(0, _steps(length) * 2) as block:
                chunk = self.values.chunk(first_block + block, kv_head)
                starts = [
                    T.Bind(chunk + (v // self.parts * CHUNK * CHUNK + v % self.parts * 2 * lanes))
                    for v in vectors
                ]
                with T.serial(0, CHUNK // 2) as pair:
                    values = []
                    for start in starts:
                        at = T.Bind(start + pair * (2 * CHUNK))
                        if self.from_memory:
                            self.values.fetch(at + self._ahead)
                        values.append(self.values.pairs(at))
                    for head, row in enumerate(sums):
                        at = [slot, heads + head, block * CHUNK + pair * 2]
                        self._add_products(row, values, load(self.weights, at, 2))
            for head, row in enumerate(sums):
                scale = broadcast(load(self.scores, [slot, heads + head, 0], 1), lanes)
                for vector, total in zip(vectors, row, strict=True):
                    output = T.Cast(vector_type("float32", lanes), total.value) * scale
                    store(self.splits.partial, output, [slot, heads + head, vector * lanes])

    @property
    def _columns(self) -> int:
        """Vectors of outputs that are computed together."""
        return math.gcd(2, self.width // self.isa.lanes)

    @property
    def _ahead(self) -> int:
        """Elements of values, of those in a chunk, that are fetched while scores are weighed."""
        return min(_AHEAD * self._columns * self.isa.lanes, self.width) * CHUNK

    def _sums(self, vectors: int) -> list[list[Register]]:
        """Zeros, for each head of a tile."""
        zero = broadcast(T.int32(0), self.isa.lanes)
        return [[Register(zero) for _ in range(vectors)] for _ in range(self.tile)]

    def _add_products(self, sums: Sequence[Register], vectors: Sequence[Expr], pair: Expr) -> None:
        """sums[i] += vectors[i] * pair, the products of two elements added."""
        word = broadcast(T.Bind(T.reinterpret("int32", pair)), self.isa.lanes)
        factor = T.Bind(T.reinterpret(vector_type("int16", 2 * self.isa.lanes), word))
        for total, vector in zip(sums, vectors, strict=True):
            total.set(self.isa.add_pairs(total.value, vector, factor))


def _steps(length: Expr) -> Expr:
    return (length + (_STEP - 1)) // _STEP


def _below(first: Expr, length: Expr, lanes: int) -> Expr:
    """Which of the positions from `first` on are below the length."""
    return T.Bind(lane_numbers(lanes) + broadcast(first, lanes)) < broadcast(length, lanes)
