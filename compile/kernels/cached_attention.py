"""Causal grouped-query attention over a float32 cache of keys and values, with online softmax.

The new keys and values are written into the cache first; then every token attends to the cache up
to its own position. The order of splits, and what the result does not depend on: see
attention_splits.

The query heads that share a key head are treated together, so that the cache is read once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from emberd.compile.isa.isa import Isa
from emberd.compile.isa.math import (
    LOWEST,
    Register,
    computed,
    exp,
    lane,
    lane_numbers,
    max_modulo,
    pinned,
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
    stack_buffer,
    store,
    type_of,
)
from emberd.compile.kernels.attention_splits import (
    SPLIT,
    Splits,
    attend_from_many_tokens,
    attend_from_one_token,
    splits_scratch,
)
from emberd.compile.kernels.dimensions import Scratch, dimension, token_suffix, vector_lanes
from numpy.typing import NDArray
from tvm.script import tirx as T  # noqa: N812

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
    isa: Isa, *, query_heads: int, kv_heads: int, head_dim: int, tokens: int | None
) -> PrimFunc:
    """query f32[T, Hq, D], key f32[T, Hkv, D], value f32[T, Hkv, D], positions i32[T]; key_cache
    and value_cache f32[capacity, Hkv, D] in place -> out f32[T, Hq * D]; scratch: see
    `cached_attention_scratch`.

    positions increase by one from token to token and are below the capacity.
    """
    name = f"cached_attention_hq{query_heads}_hkv{kv_heads}_d{head_dim}_{token_suffix(tokens)}"
    with kernel(name) as builder:
        rows = dimension("tokens", tokens)
        cache_shape = (dimension("capacity"), kv_heads, head_dim)
        query = T.arg("query", T.buffer((rows, query_heads, head_dim), "float32"))
        key = T.arg("key", T.buffer((rows, kv_heads, head_dim), "float32"))
        value = T.arg("value", T.buffer((rows, kv_heads, head_dim), "float32"))
        positions = T.arg("positions", T.buffer((rows,), "int32"))
        key_cache = T.arg("key_cache", T.buffer(cache_shape, "float32"))
        value_cache = T.arg("value_cache", T.buffer(cache_shape, "float32"))
        out = T.arg("out", T.buffer((rows, query_heads * head_dim), "float32"))
        scratch = [
            T.arg(part, T.buffer(shape, dtype))
            for part, (dtype, shape) in zip(
                ("partial", "of_split", "merged"),
                splits_scratch(rows, query_heads, head_dim),
                strict=True,
            )
        ]
        splits = Splits(isa, head_dim, out, *scratch)
        attention = _Attention(
            isa=isa,
            group=query_heads // kv_heads,
            head_dim=head_dim,
            query=query,
            key_cache=key_cache,
            value_cache=value_cache,
            partial=splits.partial,
            of_split=splits.of_split,
        )
        with T.sblock("root"):
            with T.parallel(0, rows) as token:
                position = T.Bind(T.Cast("int64", positions[token]))
                attention.append(key, key_cache, token, position)
                attention.append(value, value_cache, token, position)
                with T.serial(0, query_heads) as head:
                    splits.begin(token, head)
            heads = (query_heads, kv_heads)
            if tokens == 1:
                attend_from_one_token(attention.attend, splits, positions, *heads)
            else:
                attend_from_many_tokens(attention.attend, splits, positions, rows, *heads)
    return builder.get()


def cached_attention_scratch(
    tokens: int, *, query_heads: int, kv_heads: int, head_dim: int
) -> Scratch:
    """See `splits_scratch`."""
    return splits_scratch(tokens, query_heads, head_dim)


@dataclass(frozen=True)
class _Attention:
    """The buffers of one kernel, and the steps of a split."""

    isa: Isa
    group: int  # query heads for each key head
    head_dim: int
    query: Expr
    key_cache: Expr
    value_cache: Expr
    partial: Expr
    of_split: Expr

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
            store(cache, row, [position, head, first])

    def attend(self, token: Expr, kv_head: Expr, split: Expr, position: Expr, slot: Expr) -> None:
        """See attention_splits.Attend."""
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
                store(self.of_split, lane(maximum.value, head), [slot, first_head + head, 0])
                store(self.of_split, lane(sums, head), [slot, first_head + head, 1])

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
                    key = load(self.key_cache, [row, kv_head, first], lanes)
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
                    load(self.value_cache, [row, kv_head, column], lanes) for column in columns
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
