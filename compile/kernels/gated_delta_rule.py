"""The gated delta rule (Yang et al., 2024, "Gated Delta Networks"), in its recurrent form.

Each value head has a state S [Dk, Dv] that a token decays, corrects and reads:
    S = e^g S;  S = S + k (beta (v - S^T k))^T;  o = S^T q / sqrt(Dk)
with q and k of length one. The recurrent form is used for any number of tokens, so that the result
does not depend on how a prompt is cut; a task keeps its part of one state in the cache meanwhile.
The chunked form (WY; Yang et al., 2024, "Parallelizing Linear Transformers with the Delta Rule over
Sequence Length") would not be faster on vector units: with 64 tokens a chunk and heads of 128, a
token takes 3 * 128 * 128 products with the state and 4 * 32 * 128 with the tokens of its chunk, as
many as the 4 * 128 * 128 here. It is for processors that multiply matrices.
"""

from __future__ import annotations

import math

import numpy as np
from emberd.compile.isa.isa import Isa
from emberd.compile.isa.math import Register, exp, negate, reciprocal_sqrt, sigmoid, softplus
from emberd.compile.isa.vector import (
    Expr,
    PrimFunc,
    broadcast,
    constant,
    kernel,
    load,
    multiply_add,
    store,
    sum_lanes,
)
from emberd.compile.kernels.dimensions import (
    Scratch,
    block_size,
    dimension,
    token_suffix,
    vector_lanes,
)
from numpy.typing import NDArray
from tvm.script import tirx as T  # noqa: N812

_NORM_EPS = 1e-6
_DECODE_VECTORS = 16  # of a state row: long runs, because the state comes from memory
_PREFILL_VECTORS = 4  # what a task works on stays in the first-level cache


def reference(
    qkv: NDArray[np.float64],
    b: NDArray[np.float64],
    a: NDArray[np.float64],
    a_log: NDArray[np.float64],
    dt_bias: NDArray[np.float64],
    state: NDArray[np.float64],
    *,
    key_heads: int,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """qkv [T, C], b and a [T, Hv], a_log and dt_bias [Hv], state [Hv, Dk, Dv]
    -> out [T, Hv * Dv], new state. A row of qkv is [q Hk * Dk | k Hk * Dk | v Hv * Dv].
    """
    tokens = len(qkv)
    value_heads, key_dim, value_dim = state.shape
    q, k, v = np.split(qkv, [key_heads * key_dim, 2 * key_heads * key_dim], axis=1)
    q, k = (x.reshape(tokens, key_heads, key_dim) for x in (q, k))
    q, k = (x / np.sqrt(np.sum(x * x, -1, keepdims=True) + _NORM_EPS) for x in (q, k))
    q, k = (np.repeat(x, value_heads // key_heads, axis=1) for x in (q, k))
    v = v.reshape(tokens, value_heads, value_dim)
    beta = 1.0 / (1.0 + np.exp(-b))
    decay = np.exp(-np.exp(a_log) * np.logaddexp(0.0, a + dt_bias))
    out = np.empty_like(v)
    for t in range(tokens):
        state = state * decay[t, :, None, None]
        error = v[t] - np.einsum("hkv,hk->hv", state, k[t])
        state = state + np.einsum("hk,hv->hkv", k[t], beta[t, :, None] * error)
        out[t] = np.einsum("hkv,hk->hv", state, q[t]) / np.sqrt(key_dim)
    return out.reshape(tokens, -1), state


def gated_delta_rule(
    isa: Isa,
    *,
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    tokens: int | None,
) -> PrimFunc:
    """qkv f32[T, C], b f32[T, Hv], a f32[T, Hv], A_log f32[Hv], dt_bias f32[Hv]; state
    f32[Hv, Dk, Dv] in place -> out f32[T, Hv * Dv]; scratch: see `gated_delta_rule_scratch`.
    """
    keys = key_heads * key_dim
    lanes = vector_lanes(isa, value_dim)
    vectors = block_size(value_dim // lanes, _DECODE_VECTORS if tokens == 1 else _PREFILL_VECTORS)
    blocks = value_dim // (lanes * vectors)
    name = f"gated_delta_rule_hk{key_heads}_hv{value_heads}_dk{key_dim}_dv{value_dim}"
    with kernel(f"{name}_{token_suffix(tokens)}") as builder:
        rows = dimension("tokens", tokens)
        gate_shape = (rows, value_heads)
        qkv = T.arg("qkv", T.buffer((rows, 2 * keys + value_heads * value_dim), "float32"))
        b = T.arg("b", T.buffer(gate_shape, "float32"))
        a = T.arg("a", T.buffer(gate_shape, "float32"))
        a_log = T.arg("A_log", T.buffer((value_heads,), "float32"))
        dt_bias = T.arg("dt_bias", T.buffer((value_heads,), "float32"))
        state = T.arg("state", T.buffer((value_heads, key_dim, value_dim), "float32"))
        out = T.arg("out", T.buffer((rows, value_heads * value_dim), "float32"))
        gates = T.arg("gates", T.buffer((rows, 2, value_heads), "float32"))
        scales = T.arg("scales", T.buffer((rows, 2, key_heads), "float32"))
        with T.sblock("root"):
            with T.parallel(0, rows) as token:
                _compute_gates(isa, a, b, a_log, dt_bias, gates, token, value_heads)
                _compute_scales(isa, qkv, scales, token, key_heads, key_dim)
            with T.parallel(0, value_heads * blocks) as task:
                head = T.Bind(task // blocks)
                first = T.Bind(task % blocks * (vectors * lanes))
                key_head = T.Bind(head // (value_heads // key_heads))
                query_at = T.Bind(key_head * key_dim)
                key_at = T.Bind(query_at + keys)
                zero = constant(0.0, lanes)
                columns = [first + i * lanes for i in range(vectors)]
                # S^T k of the coming token, taken while S is in registers for the present one.
                projected = [Register(zero) for _ in columns]
                with T.serial(0, key_dim) as row:
                    key = broadcast(T.Bind(qkv[0, key_at + row]), lanes)
                    for total, column in zip(projected, columns, strict=True):
                        total.add_product(key, load(state, [head, row, column], lanes))
                with T.serial(0, rows) as token:
                    decay = broadcast(T.Bind(gates[token, 0, head]), lanes)
                    # q and k stay as they are; their scales go into the products with them.
                    scale = broadcast(T.Bind(scales[token, 1, key_head]), lanes)
                    old = T.Bind(decay * scale)
                    strength = T.Bind(broadcast(T.Bind(gates[token, 1, head]), lanes) * scale)
                    corrections = []
                    for total, column in zip(projected, columns, strict=True):
                        value = load(qkv, [token, 2 * keys + head * value_dim + column], lanes)
                        error = multiply_add(negate(total.value), old, value)
                        corrections.append(T.Bind(error * strength))
                        total.set(zero)
                    following = T.Bind(T.min(token + 1, rows - 1))
                    read = [Register(zero) for _ in columns]
                    with T.serial(0, key_dim) as row:
                        query = broadcast(T.Bind(qkv[token, query_at + row]), lanes)
                        key = broadcast(T.Bind(qkv[token, key_at + row]), lanes)
                        next_key = broadcast(T.Bind(qkv[following, key_at + row]), lanes)
                        for i, column in enumerate(columns):
                            value = T.Bind(load(state, [head, row, column], lanes) * decay)
                            value = multiply_add(key, corrections[i], value)
                            store(state, value, [head, row, column])
                            read[i].add_product(query, value)
                            if tokens != 1:
                                projected[i].add_product(next_key, value)
                    scale = broadcast(T.Bind(scales[token, 0, key_head]), lanes)
                    for total, column in zip(read, columns, strict=True):
                        store(out, total.value * scale, [token, head * value_dim + column])
    return builder.get()


def gated_delta_rule_scratch(
    tokens: int, *, key_heads: int, value_heads: int, key_dim: int, value_dim: int
) -> Scratch:
    """gates [T, 2, Hv]: decay and beta of each value head; scales [T, 2, Hk]: what makes q (with
    its 1 / sqrt(Dk)) and k of each key head unit vectors."""
    return [("float32", (tokens, 2, value_heads)), ("float32", (tokens, 2, key_heads))]


def _compute_gates(
    isa: Isa,
    a: Expr,
    b: Expr,
    a_log: Expr,
    dt_bias: Expr,
    gates: Expr,
    token: Expr,
    value_heads: int,
) -> None:
    lanes = vector_lanes(isa, value_heads)
    with T.serial(0, value_heads // lanes) as vector:
        head = T.Bind(vector * lanes)
        step = softplus(T.Bind(load(a, [token, head], lanes) + load(dt_bias, [head], lanes)))
        rate = exp(load(a_log, [head], lanes))
        store(gates, exp(negate(rate * step)), [token, 0, head])
        store(gates, sigmoid(load(b, [token, head], lanes)), [token, 1, head])


def _compute_scales(
    isa: Isa, qkv: Expr, scales: Expr, token: Expr, key_heads: int, key_dim: int
) -> None:
    lanes = vector_lanes(isa, key_dim)
    with T.serial(0, 2 * key_heads) as head:
        total = Register(constant(0.0, lanes))
        with T.serial(0, key_dim // lanes) as vector:
            value = load(qkv, [token, head * key_dim + vector * lanes], lanes)
            total.add_product(value, value)
        length = reciprocal_sqrt(T.Bind(sum_lanes(total.value) + T.float32(_NORM_EPS)))
        of_query = T.float32(1.0 / math.sqrt(key_dim))
        factor = T.Select(head < key_heads, of_query, T.float32(1.0))
        store(scales, length * factor, [token, head // key_heads, head % key_heads])
