"""The splits of a context that attention goes through one after the other, or side by side.

A token attends to one split of `SPLIT` positions at a time (Flash-Decoding, Dao et al., 2023). The
splits begin at multiples of `SPLIT` and their partial results are merged in order. A single token's
splits are computed in parallel. Of many tokens, a task takes a few through one split after the
other, while its keys and values are in the second-level cache. Either way the arithmetic of a token
is the same, so the result depends neither on how a prompt is cut nor on the threads.
"""

from __future__ import annotations

from collections.abc import Callable

from emberd.compile.isa.isa import Isa
from emberd.compile.isa.math import LOWEST, exp, pinned
from emberd.compile.isa.vector import Expr, broadcast, constant, load, multiply_add, store
from emberd.compile.kernels.dimensions import Dimension, Scratch, vector_lanes
from tvm.script import tirx as T  # noqa: N812

SPLIT = 256  # positions
SLOTS = 16  # tasks of a key head, each with its place in scratch

_BLOCK_TOKENS = 8  # that go through a split together

Attend = Callable[[Expr, Expr, Expr, Expr, Expr], None]
"""attend(token, kv_head, split, position, slot) computes a split for all the query heads of a key
head, up to the token's position, into a slot of `Splits.partial` and `Splits.of_split`."""


class Splits:
    """What is known of a split and of the splits merged before it.

    partial [SLOTS, Hq, width]: a split's unnormalised output, of which D columns are used;
    of_split [SLOTS, Hq, 2]: the maximum of its scores, and the sum of their exponentials;
    merged [T, Hq, 2]: the same of all splits before; out [T, Hq * D]: their output.
    """

    def __init__(
        self, isa: Isa, head_dim: int, out: Expr, partial: Expr, of_split: Expr, merged: Expr
    ) -> None:
        self.partial, self.of_split = partial, of_split
        self._head_dim, self._lanes = head_dim, vector_lanes(isa, head_dim)
        self._out, self._merged = out, merged

    def begin(self, token: Expr, head: Expr) -> None:
        """Nothing merged yet."""
        store(self._merged, T.float32(LOWEST), [token, head, 0])
        store(self._merged, T.float32(0.0), [token, head, 1])

    def merge(self, token: Expr, head: Expr, slot: Expr) -> None:
        """Add a split to what was merged before it; the output is undefined before the first."""
        lanes = self._lanes
        maximum, total = (load(self.of_split, [slot, head, i], 1) for i in range(2))
        old_maximum, old_total = (load(self._merged, [token, head, i], 1) for i in range(2))
        new_maximum = T.Bind(T.max(maximum, old_maximum))
        old_factor, factor = exp(old_maximum - new_maximum), exp(maximum - new_maximum)
        store(self._merged, new_maximum, [token, head, 0])
        new_total = multiply_add(total, factor, T.Bind(old_total * old_factor))
        store(self._merged, new_total, [token, head, 1])
        is_first = broadcast(old_maximum == T.float32(LOWEST), lanes)
        with T.serial(0, self._head_dim // lanes) as vector:
            first = T.Bind(vector * lanes)
            at = [token, head * self._head_dim + first]
            old = pinned(T.Select(is_first, constant(0.0, lanes), load(self._out, at, lanes)))
            old = T.Bind(old * broadcast(old_factor, lanes))
            new = load(self.partial, [slot, head, first], lanes)
            store(self._out, multiply_add(new, broadcast(factor, lanes), old), at)

    def finish(self, token: Expr, head: Expr) -> None:
        """Divide by the sum of the exponentials."""
        factor = T.Bind(T.float32(1.0) / load(self._merged, [token, head, 1], 1))
        with T.serial(0, self._head_dim // self._lanes) as vector:
            at = [token, head * self._head_dim + vector * self._lanes]
            output = load(self._out, at, self._lanes)
            store(self._out, output * broadcast(factor, self._lanes), at)


def splits_scratch(tokens: int, query_heads: int, width: int) -> Scratch:
    """partial, of_split and merged of `Splits`."""
    return [
        ("float32", (SLOTS, query_heads, width)),
        ("float32", (SLOTS, query_heads, 2)),
        ("float32", (tokens, query_heads, 2)),
    ]


def attend_from_one_token(
    attend: Attend, splits: Splits, positions: Expr, query_heads: int, kv_heads: int
) -> None:
    """Waves of up to SLOTS splits, computed in parallel. `Splits.begin` was called."""
    token = 0
    count = T.Bind(positions[token] // SPLIT + 1)
    with T.serial(0, (count + SLOTS - 1) // SLOTS) as wave:
        first = T.Bind(wave * SLOTS)
        slots = T.Bind(T.min(count - first, SLOTS))
        with T.parallel(0, slots * kv_heads) as task:
            slot, kv_head = T.Bind(task // kv_heads), T.Bind(task % kv_heads)
            attend(token, kv_head, first + slot, positions[token], slot)
        with T.parallel(0, query_heads) as head, T.serial(0, slots) as slot:
            splits.merge(token, head, slot)
    with T.serial(0, query_heads) as head:
        splits.finish(token, head)


def attend_from_many_tokens(
    attend: Attend,
    splits: Splits,
    positions: Expr,
    rows: Dimension,
    query_heads: int,
    kv_heads: int,
) -> None:
    """SLOTS tasks for each key head; a task takes every SLOTS-th block of tokens."""
    group, stride = query_heads // kv_heads, SLOTS * _BLOCK_TOKENS
    with T.parallel(0, SLOTS * kv_heads) as task:
        slot, kv_head = T.Bind(task // kv_heads), T.Bind(task % kv_heads)
        first_head, first_token = T.Bind(kv_head * group), T.Bind(slot * _BLOCK_TOKENS)
        with T.serial(0, (rows - first_token + stride - 1) // stride) as round_:
            first = T.Bind(round_ * stride + first_token)
            count = T.Bind(T.min(rows - first, _BLOCK_TOKENS))
            with T.serial(0, positions[first + count - 1] // SPLIT + 1) as split:
                # Of the block's tokens, those before this split do not see it.
                skipped = T.Bind(T.max(T.Cast("int64", split * SPLIT - positions[first]), 0))
                with T.serial(0, count - skipped) as index:
                    token = T.Bind(first + skipped + index)
                    attend(token, kv_head, split, positions[token], slot)
                    with T.serial(0, group) as head:
                        splits.merge(token, first_head + head, slot)
            with T.serial(0, count) as index, T.serial(0, group) as head:
                splits.finish(first + index, first_head + head)
