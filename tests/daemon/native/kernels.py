# mypy: ignore-errors
"""The kernels of the tests' tiny model: each does one thing that the core has to get right."""

import tvm
from tvm.script import tirx as T  # noqa: N812

VOCABULARY, HIDDEN, EXPERTS, SLOTS = 16, 16, 4, 6


@T.prim_func(s_tir=True)
def embed(tokens_: T.handle, table: T.Buffer((16, 16), "float32"), hidden_: T.handle):
    """hidden[t] = table[tokens[t]]."""
    n = T.int64()
    tokens = T.match_buffer(tokens_, (n,), "int32")
    hidden = T.match_buffer(hidden_, (n, 16), "float32")
    for t in T.parallel(n):
        for i in range(16):
            hidden[t, i] = table[tokens[t], i]


@T.prim_func(s_tir=True)
def accumulate(hidden_: T.handle, state: T.Buffer((16,), "float32"), out_: T.handle):
    """state = state / 2 + hidden[t]; out[t] = state: what recurrent layers do to their state."""
    n = T.int64()
    hidden = T.match_buffer(hidden_, (n, 16), "float32")
    out = T.match_buffer(out_, (n, 16), "float32")
    for i in T.parallel(16):
        for t in range(n):
            state[i] = state[i] * T.float32(0.5) + hidden[t, i]
            out[t, i] = state[i]


@T.prim_func(s_tir=True)
def remember(hidden_: T.handle, positions_: T.handle, cache_: T.handle, out_: T.handle):
    """cache[positions[t]] = hidden[t]; out[t] = sum of the cache up to there."""
    n = T.int64()
    capacity = T.int64()
    hidden = T.match_buffer(hidden_, (n, 16), "float32")
    positions = T.match_buffer(positions_, (n,), "int32")
    cache = T.match_buffer(cache_, (capacity, 16), "float32")
    out = T.match_buffer(out_, (n, 16), "float32")
    for i in T.parallel(16):
        for t in range(n):
            cache[positions[t], i] = hidden[t, i]
            out[t, i] = T.float32(0)
            for p in range(positions[t] + 1):
                out[t, i] = out[t, i] + cache[p, i]


@T.prim_func(s_tir=True)
def choose(tokens_: T.handle, ids_: T.handle, weights_: T.handle, scores_: T.handle):
    """ids[t] = (tokens[t] mod 4, tokens[t] / 3): tokens 12 and up choose an expert beyond 3;
    weights[t] = (1 - tokens[t] / 32, tokens[t] / 32); scores[t] are those, and 0 of the others."""
    n = T.int64()
    tokens = T.match_buffer(tokens_, (n,), "int32")
    ids = T.match_buffer(ids_, (n, 2), "int32")
    weights = T.match_buffer(weights_, (n, 2), "float32")
    scores = T.match_buffer(scores_, (n, 4), "float32")
    for t in range(n):
        ids[t, 0] = tokens[t] % 4
        ids[t, 1] = T.truncdiv(tokens[t], 3)
        weights[t, 1] = T.Cast("float32", tokens[t]) / T.float32(32)
        weights[t, 0] = T.float32(1) - weights[t, 1]
        for expert in range(4):
            scores[t, expert] = T.Select(
                ids[t, 0] == expert,
                weights[t, 0],
                T.Select(ids[t, 1] == expert, weights[t, 1], T.float32(0)),
            )


@T.prim_func(s_tir=True)
def apply_experts(
    hidden_: T.handle,
    ids_: T.handle,
    table: T.Buffer((4,), "int32"),
    bank_: T.handle,
    out_: T.handle,
):
    """out[t] = hidden[t] * the product of the chosen experts' vectors."""
    n = T.int64()
    slots = T.int64()
    hidden = T.match_buffer(hidden_, (n, 16), "float32")
    ids = T.match_buffer(ids_, (n, 2), "int32")
    bank = T.match_buffer(bank_, (slots, 16), "float32")
    out = T.match_buffer(out_, (n, 16), "float32")
    for t in T.parallel(n):
        for i in range(16):
            out[t, i] = hidden[t, i] * bank[table[ids[t, 0]], i] * bank[table[ids[t, 1]], i]


@T.prim_func(s_tir=True)
def head(hidden_: T.handle, weight: T.Buffer((16, 16), "float32"), logits_: T.handle):
    """logits[t] = weight @ hidden[t]."""
    n = T.int64()
    hidden = T.match_buffer(hidden_, (n, 16), "float32")
    logits = T.match_buffer(logits_, (n, 16), "float32")
    for v in T.parallel(16):
        for t in range(n):
            logits[t, v] = T.float32(0)
            for i in range(16):
                logits[t, v] = logits[t, v] + hidden[t, i] * weight[v, i]


KERNELS = ("embed", "accumulate", "remember", "choose", "apply_experts", "head")


def build(path: str) -> None:
    """Compiles the kernels into a shared library at `path`, for any CPU of this machine's kind."""
    functions = {name: globals()[name].with_attr("global_symbol", name) for name in KERNELS}
    tvm.compile(tvm.IRModule(functions), target={"kind": "llvm"}).export_library(path)
