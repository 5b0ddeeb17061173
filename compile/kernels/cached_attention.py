"""Causal grouped-query attention over a cache of keys and values, with online softmax.

The new keys and values are written into the cache first; then every token attends to the cache up
to its own position, one split of `SPLIT` positions at a time (Flash-Decoding, Dao et al., 2023).
The splits begin at multiples of `SPLIT` and their partial results are merged in order, whether they
were computed at the same time (decode: tasks share a token) or one after the other (prefill: a task
has its own tokens). So the result does not depend on how a prompt is cut, nor on the threads.

The query heads that share a key head are treated together, so that the cache is read once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from emberd.compile.isa.isa import Isa
from emberd.compile.isa.math import (
    LOWEST,
    Register,
    computed,
    exp,
    lane,
    lane_numbers,
    load_float,
    max_modulo,
    pinned,
    store_float,
    sum_each,
    sum_modulo,
)
from emberd.compile.isa.vector import (
    Expr,
    PrimFunc,
    broadcast,
    constant,
    kernel,
    load,
    multiply_add,
    prefetch,
    stack_buffer,
    store,
    type_of,
)
from emberd.compile.kernels.dimensions import Scratch, dimension, token_suffix, vector_lanes
from numpy.typing import NDArray
from tvm.script import tirx as T  # noqa: N812

CacheType = Literal["f32", "f16"]

SPLIT = 256  # positions
SLOTS = 16  # partial results in scratch: the number of splits, or of tokens, under way at a time

_DTYPES = {"f32": "float32", "f16": "float16"}
_BLOCK_SCORES = 128  # scores held on the stack: 512 bytes


def reference(
    query: NDArray[np.float64],
    key: NDArray[np.float64],
    value: NDArray[np.float64],
    positions: NDArray[np.int32],
    key_cache: NDArray[np.float64],
    value_cache: NDArray[np.float64],
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """query [T, Hq, D], key and value [T, Hkv, D], positions [T], caches [capacity, Hkv, D]
    -> out [T, Hq * D], new caches.

    Query head h reads key head h // (Hq / Hkv).
    """
    tokens, query_heads, head_dim = query.shape
    key_cache, value_cache = key_cache.copy(), value_cache.copy()
    key_cache[positions], value_cache[positions] = key, value
    out = np.empty_like(query)
    for t, position in enumerate(positions):
        for head in range(query_heads):
            shared = head // (query_heads // key.shape[1])
            scores = key_cache[: position + 1, shared] @ query[t, head] / math.sqrt(head_dim)
            weights = np.exp(scores - scores.max())
            out[t, head] = weights / weights.sum() @ value_cache[: position + 1, shared]
    return out.reshape(tokens, -1), key_cache, value_cache


def cached_attention(
    isa: Isa,
    *,
    query_heads: int,
    kv_heads: int,
    head_dim: int,
    cache_dtype: CacheType,
    tokens: int | None,
) -> PrimFunc:
    """query f32[T, Hq, D], key f32[T, Hkv, D], value f32[T, Hkv, D], positions i32[T]; key_cache
    and value_cache f32 or f16 [capacity, Hkv, D] in place -> out f32[T, Hq * D]; scratch: see
    `cached_attention_scratch`.

    positions increase by one from token to token and are below the capacity.
    """
    dtype = _DTYPES[cache_dtype]
    name = f"cached_attention_{cache_dtype}_hq{query_heads}_hkv{kv_heads}_d{head_dim}"
    with kernel(f"{name}_{token_suffix(tokens)}") as builder:
        rows = dimension("tokens", tokens)
        cache_shape = (dimension("capacity"), kv_heads, head_dim)
        query = T.arg("query", T.buffer((rows, query_heads, head_dim), "float32"))
        key = T.arg("key", T.buffer((rows, kv_heads, head_dim), "float32"))
        value = T.arg("value", T.buffer((rows, kv_heads, head_dim), "float32"))
        positions = T.arg("positions", T.buffer((rows,), "int32"))
        key_cache = T.arg("key_cache", T.buffer(cache_shape, dtype))
        value_cache = T.arg("value_cache", T.buffer(cache_shape, dtype))
        out = T.arg("out", T.buffer((rows, query_heads * head_dim), "float32"))
        partial = T.arg("partial", T.buffer((SLOTS, query_heads, head_dim), "float32"))
        statistics = T.arg("statistics", T.buffer((SLOTS, query_heads, 4), "float32"))
        attention = _Attention(
            isa=isa,
            group=query_heads // kv_heads,
            head_dim=head_dim,
            query=query,
            key_cache=key_cache,
            value_cache=value_cache,
            out=out,
            partial=partial,
            statistics=statistics,
        )
        with T.sblock("root"):
            with T.parallel(0, rows) as token:
                position = T.Bind(T.Cast("int64", positions[token]))
                attention.append(key, key_cache, token, position)
                attention.append(value, value_cache, token, position)
            if tokens == 1:
                _attend_from_one_token(attention, positions, query_heads, kv_heads)
            else:
                _attend_from_many_tokens(attention, positions, rows, kv_heads)
    return builder.get()


def cached_attention_scratch(
    tokens: int, *, query_heads: int, kv_heads: int, head_dim: int, cache_dtype: CacheType
) -> Scratch:
    """partial [SLOTS, Hq, D]: unnormalised outputs of a split; statistics [SLOTS, Hq, 4]: maximum
    and sum of its exponentials, then those of all the splits merged so far."""
    return [
        ("float32", (SLOTS, query_heads, head_dim)),
        ("float32", (SLOTS, query_heads, 4)),
    ]


def _attend_from_one_token(
    attention: _Attention, positions: Expr, query_heads: int, kv_heads: int
) -> None:
    """Waves of up to SLOTS splits, computed in parallel."""
    token, running_slot = 0, 0
    splits = T.Bind(positions[token] // SPLIT + 1)
    with T.serial(0, query_heads) as head:
        attention.begin(head, running_slot)
    with T.serial(0, (splits + SLOTS - 1) // SLOTS) as wave:
        first = T.Bind(wave * SLOTS)
        count = T.Bind(T.min(splits - first, SLOTS))
        with T.parallel(0, count * kv_heads) as task:
            slot, kv_head = T.Bind(task // kv_heads), T.Bind(task % kv_heads)
            attention.attend(token, kv_head, first + slot, positions[token], slot)
        with T.parallel(0, query_heads) as head, T.serial(0, count) as slot:
            attention.merge(token, head, slot, running_slot)
    with T.serial(0, query_heads) as head:
        attention.finish(token, head, running_slot)


def _attend_from_many_tokens(
    attention: _Attention, positions: Expr, rows: Expr, kv_heads: int
) -> None:
    """SLOTS tasks for each key head; a task takes every SLOTS-th token."""
    with T.parallel(0, SLOTS * kv_heads) as task:
        slot, kv_head = T.Bind(task // kv_heads), T.Bind(task % kv_heads)
        first_head = T.Bind(kv_head * attention.group)
        with T.serial(0, (rows - slot + SLOTS - 1) // SLOTS) as round_:
            token = T.Bind(round_ * SLOTS + slot)
            with T.serial(0, attention.group) as head:
                attention.begin(first_head + head, slot)
            with T.serial(0, positions[token] // SPLIT + 1) as split:
                attention.attend(token, kv_head, split, positions[token], slot)
                with T.serial(0, attention.group) as head:
                    attention.merge(token, first_head + head, slot, slot)
            with T.serial(0, attention.group) as head:
                attention.finish(token, first_head + head, slot)


@dataclass(frozen=True)
class _Attention:
    """The buffers of one kernel, and the steps that both orders of computation are made of."""

    isa: Isa
    group: int  # query heads for each key head
    head_dim: int
    query: Expr
    key_cache: Expr
    value_cache: Expr
    out: Expr
    partial: Expr
    statistics: Expr

    @property
    def lanes(self) -> int:
        return vector_lanes(self.isa, self.head_dim)

    @property
    def tile(self) -> int:
        """Query heads computed together. Vectors of scores hold `tile` heads of several positions,
        one position after the other."""
        return math.gcd(self.group, self.lanes)

    def append(self, new: Expr, cache: Expr, token: Expr, position: Expr) -> None:
        """Write the key or the value of one token into its cache."""
        parts = self.head_dim // self.lanes
        with T.serial(0, int(new.shape[1])) as head, T.serial(0, parts) as part:
            first = T.Bind(part * self.lanes)
            row = computed(load(new, [token, head, first], self.lanes))
            store_float(self.isa, cache, row, [position, head, first])

    def begin(self, head: Expr, slot: Expr) -> None:
        """Nothing merged yet."""
        store(self.statistics, T.float32(LOWEST), [slot, head, 2])
        store(self.statistics, T.float32(0.0), [slot, head, 3])

    def merge(self, token: Expr, head: Expr, slot: Expr, running_slot: Expr) -> None:
        """Add a split to what was merged before it; the output is undefined before the first."""
        maximum, total = (load(self.statistics, [slot, head, i], 1) for i in (0, 1))
        old_maximum, old_total = (load(self.statistics, [running_slot, head, i], 1) for i in (2, 3))
        new_maximum = T.Bind(T.max(maximum, old_maximum))
        old_factor, factor = exp(old_maximum - new_maximum), exp(maximum - new_maximum)
        store(self.statistics, new_maximum, [running_slot, head, 2])
        new_total = multiply_add(total, factor, T.Bind(old_total * old_factor))
        store(self.statistics, new_total, [running_slot, head, 3])
        with T.serial(0, self.head_dim // self.lanes) as vector:
            first = T.Bind(vector * self.lanes)
            at = [token, head * self.head_dim + first]
            old = _unless(old_maximum == T.float32(LOWEST), load(self.out, at, self.lanes))
            old = T.Bind(old * broadcast(old_factor, self.lanes))
            new = load(self.partial, [slot, head, first], self.lanes)
            store(self.out, multiply_add(new, broadcast(factor, self.lanes), old), at)

    def finish(self, token: Expr, head: Expr, slot: Expr) -> None:
        """Divide by the sum of the exponentials."""
        factor = T.Bind(T.float32(1.0) / load(self.statistics, [slot, head, 3], 1))
        with T.serial(0, self.head_dim // self.lanes) as vector:
            at = [token, head * self.head_dim + vector * self.lanes]
            store(self.out, load(self.out, at, self.lanes) * broadcast(factor, self.lanes), at)

    def attend(self, token: Expr, kv_head: Expr, split: Expr, position: Expr, slot: Expr) -> None:
        """One split for the query heads of one key head, into `slot` of the scratch."""
        block = _BLOCK_SCORES // self.tile
        begin = T.Bind(split * SPLIT)
        length = T.Bind(T.min(position + 1 - begin, SPLIT))
        with T.serial(0, self.group // self.tile) as tile:
            first_head = T.Bind(kv_head * self.group + tile * self.tile)
            maximum = Register(constant(LOWEST, self.lanes))
            total = Register(constant(0.0, self.lanes))
            scores = stack_buffer(_BLOCK_SCORES)
            with T.serial(0, (length + block - 1) // block) as step:
                base = T.Bind(begin + step * block)
                count = T.Bind(T.min(length - step * block, block))
                vectors = T.Bind((count * self.tile + self.lanes - 1) // self.lanes)
                largest = self._scores(scores, token, first_head, kv_head, base, count, vectors)
                new_maximum = T.Bind(T.max(maximum.value, max_modulo(largest, self.tile)))
                rescale = exp(maximum.value - new_maximum)
                maximum.set(new_maximum)
                added = Register(constant(0.0, self.lanes))
                with T.serial(0, vectors) as vector:
                    at = [vector * self.lanes]
                    weight = exp(load(scores, at, self.lanes) - maximum.value)
                    added.set(added.value + weight)
                    store(scores, weight, at)
                total.set(multiply_add(total.value, rescale, added.value))
                self._accumulate(scores, rescale, kv_head, slot, first_head, base, count, step == 0)
            sums = sum_modulo(total.value, self.tile)
            for head in range(self.tile):
                store(self.statistics, lane(maximum.value, head), [slot, first_head + head, 0])
                store(self.statistics, lane(sums, head), [slot, first_head + head, 1])

    def _scores(
        self,
        scores: Expr,
        token: Expr,
        first_head: Expr,
        kv_head: Expr,
        base: Expr,
        count: Expr,
        vectors: Expr,
    ) -> Expr:
        """Scaled products of queries and keys, LOWEST beyond `count`; returns their maximum by
        lane."""
        lanes, tile = self.lanes, self.tile
        places = lanes // tile  # positions in a vector
        scale = constant(1.0 / math.sqrt(self.head_dim), lanes)
        largest = Register(constant(LOWEST, lanes))
        with T.serial(0, vectors) as vector:
            place = T.Bind(vector * places)
            rows = [
                T.Bind(T.Cast("int64", base + T.min(place + i, count - 1))) for i in range(places)
            ]
            products = [Register(constant(0.0, lanes)) for _ in range(lanes)]
            with T.serial(0, self.head_dim // lanes) as part:
                first = T.Bind(part * lanes)
                queries = [
                    load(self.query, [token, first_head + head, first], lanes)
                    for head in range(tile)
                ]
                for i, row in enumerate(rows):
                    # The rows of a head are not adjacent, and the hardware does not foresee them:
                    # fetch the keys of the next block and the values of this one.
                    prefetch(self.key_cache, [row + _BLOCK_SCORES // tile, kv_head, first])
                    prefetch(self.value_cache, [row, kv_head, first])
                    key = load_float(self.isa, self.key_cache, [row, kv_head, first], lanes)
                    for head, query in enumerate(queries):
                        products[i * tile + head].add_product(key, query)
            score = T.Bind(sum_each([product.value for product in products]) * scale)
            number = T.Bind(lane_numbers(lanes) + broadcast(vector * lanes, lanes))
            valid = number < broadcast(count * tile, lanes)
            score = pinned(T.Select(valid, score, constant(LOWEST, lanes)))
            largest.set(T.max(largest.value, score))
            store(scores, score, [vector * lanes])
        return largest.value

    def _accumulate(
        self,
        weights: Expr,
        rescale: Expr,
        kv_head: Expr,
        slot: Expr,
        first_head: Expr,
        base: Expr,
        count: Expr,
        is_first: Expr,
    ) -> None:
        """partial = partial * rescale + weights * values, where partial is 0 before the first."""
        lanes, tile = self.lanes, self.tile
        width = math.gcd(lanes // tile, self.head_dim // lanes)  # vectors: fills the registers
        factors = [broadcast(lane(rescale, head), lanes) for head in range(tile)]
        with T.serial(0, self.head_dim // (lanes * width)) as part:
            columns = [T.Bind((part * width + i) * lanes) for i in range(width)]
            sums: list[list[Register]] = []
            for head, factor in enumerate(factors):
                old = (load(self.partial, [slot, first_head + head, at], lanes) for at in columns)
                sums.append([Register(_unless(is_first, value) * factor) for value in old])
            with T.serial(0, count) as place:
                row = T.Bind(T.Cast("int64", base + place))
                values = [
                    load_float(self.isa, self.value_cache, [row, kv_head, column], lanes)
                    for column in columns
                ]
                for head in range(tile):
                    weight = broadcast(T.Bind(weights[place * tile + head]), lanes)
                    for total, value in zip(sums[head], values, strict=True):
                        total.add_product(weight, value)
            for head in range(tile):
                for total, column in zip(sums[head], columns, strict=True):
                    store(self.partial, total.value, [slot, first_head + head, column])


def _unless(condition: Expr, value: Expr) -> Expr:
    """The vector, or zeros where the scalar condition holds, whatever the vector is then."""
    lanes = type_of(value)[1]
    return pinned(T.Select(broadcast(condition, lanes), constant(0.0, lanes), value))
