"""Mixture-of-experts router: softmax over all experts, then the top k, renormalised.

As in transformers' Qwen3_5MoeTopKRouter.
"""

from __future__ import annotations

import numpy as np
from emberd.compile.isa.isa import Isa
from emberd.compile.isa.math import LOWEST, Register, exp
from emberd.compile.isa.vector import (
    Buffer,
    Expr,
    PrimFunc,
    broadcast,
    constant,
    intrinsic,
    kernel,
    load,
    max_lanes,
    stack_buffer,
    store,
    sum_lanes,
    vector_type,
)
from emberd.compile.kernels.dimensions import dimension, token_suffix
from emberd.compile.kernels.dot import dot_float
from numpy.typing import NDArray
from tvm import tirx
from tvm.script import tirx as T  # noqa: N812

_PADDING = 16  # experts are padded to whole vectors of every ISA
_TAKEN = -1.0  # less than any probability


def reference(
    x: NDArray[np.float32], weight: NDArray[np.float32], top_k: int
) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.float32]]:
    """x [T, H], weight [E, H] -> ids [T, top_k] by falling probability, their weights [T, top_k],
    and the probabilities of all experts [T, padded(E)], 0 behind the last one.

    Of equal probabilities the lower id comes first. The weights of a token add up to 1.
    """
    logits = x.astype(np.float64) @ weight.astype(np.float64).T
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    probabilities = exponentials / exponentials.sum(axis=1, keepdims=True)
    ids = np.argsort(-probabilities, axis=1, kind="stable")[:, :top_k]
    weights = np.take_along_axis(probabilities, ids, axis=1)
    weights /= weights.sum(axis=1, keepdims=True)
    scores = np.zeros((len(x), padded(len(weight))), np.float32)
    scores[:, : len(weight)] = probabilities
    return ids.astype(np.int32), weights.astype(np.float32), scores


def router(isa: Isa, *, hidden: int, experts: int, top_k: int, tokens: int | None) -> PrimFunc:
    """x f32[T,H], weight f32[E,H] -> ids i32[T,top_k], weights f32[T,top_k], scores
    f32[T,padded(E)]; see `reference`.

    All ids are in 0..E-1 even when x holds NaN.
    """
    name = f"router_h{hidden}_e{experts}_k{top_k}_{token_suffix(tokens)}"
    with kernel(name) as builder:
        rows = dimension("tokens", tokens)
        x = T.arg("x", T.buffer((rows, hidden), "float32"))
        weight = T.arg("weight", T.buffer((experts, hidden), "float32"))
        ids = T.arg("ids", T.buffer((rows, top_k), "int32"))
        weights = T.arg("weights", T.buffer((rows, top_k), "float32"))
        scores = T.arg("scores", T.buffer((rows, padded(experts)), "float32"))
        with T.sblock("root"):
            dot_float(isa, weight, x, lambda value, at: store(scores, value, at))
            with (T.serial if tokens == 1 else T.parallel)(0, rows) as row:
                with T.serial(experts, padded(experts)) as expert:
                    store(scores, T.float32(LOWEST), [row, expert])
                _softmax(isa, scores, row)
                _select(isa, scores, row, experts, ids, weights)
    return builder.get()


def padded(experts: int) -> int:
    """Columns of the scores of so many experts."""
    return -(-experts // _PADDING) * _PADDING


def _softmax(isa: Isa, scores: Buffer, row: Expr) -> None:
    """In place. The padding, far below every logit, becomes 0."""
    lanes = isa.lanes
    steps = int(scores.shape[1]) // lanes
    largest = broadcast(_largest(isa, scores, row), lanes)
    total = Register(constant(0.0, lanes))
    with T.serial(0, steps) as step:
        at = [row, step * lanes]
        value = exp(load(scores, at, lanes) - largest)
        store(scores, value, at)
        total.set(total.value + value)
    denominator = broadcast(sum_lanes(total.value), lanes)
    with T.serial(0, steps) as step:
        at = [row, step * lanes]
        store(scores, load(scores, at, lanes) / denominator, at)


def _select(
    isa: Isa, scores: Buffer, row: Expr, experts: int, ids: Buffer, weights: Buffer
) -> None:
    """Takes the largest score, again and again, puts the scores back that it marked as taken, and
    divides by their sum."""
    top_k = int(ids.shape[1])
    total = stack_buffer(1)
    store(total, T.float32(0.0), [0])
    with T.serial(0, top_k) as rank:
        largest = _largest(isa, scores, row)
        expert = _first_with(isa, scores, row, largest, experts - 1)
        store(ids, expert, [row, rank])
        store(weights, largest, [row, rank])
        store(scores, T.float32(_TAKEN), [row, expert])
        store(total, load(total, [0], 1) + largest, [0])
    with T.serial(0, top_k) as rank:
        score = T.Bind(load(weights, [row, rank], 1))
        store(scores, score, [row, load(ids, [row, rank], 1)])
        store(weights, score / load(total, [0], 1), [row, rank])


def _largest(isa: Isa, scores: Buffer, row: Expr) -> Expr:
    """The largest score of a row."""
    largest = Register(constant(LOWEST, isa.lanes))
    with T.serial(0, int(scores.shape[1]) // isa.lanes) as step:
        largest.set(T.max(largest.value, load(scores, [row, step * isa.lanes], isa.lanes)))
    return max_lanes(largest.value)


def _first_with(isa: Isa, scores: Buffer, row: Expr, score: Expr, last: int) -> Expr:
    """The lowest expert with this score; `last` if there is none (NaN)."""
    lanes = isa.lanes
    integers = vector_type("int32", lanes)
    none = broadcast(T.int32(last), lanes)
    lowest = stack_buffer(lanes, "int32")
    store(lowest, none, [0])
    with T.serial(0, int(scores.shape[1]) // lanes) as step:
        candidates = T.Select(
            tirx.EQ(load(scores, [row, step * lanes], lanes), broadcast(score, lanes)),
            T.ramp(step * lanes, 1, lanes),
            none,
        )
        store(lowest, intrinsic(integers, "llvm.smin", load(lowest, [0], lanes), candidates), [0])
    return T.Bind(intrinsic("int32", "llvm.vector.reduce.smin", load(lowest, [0], lanes)))
