"""Which TIR kernel carries out an operator, with which parameters and scratch memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from emberd.compile.isa.isa import Isa
from emberd.compile.kernels.block_maxima import block_maxima
from emberd.compile.kernels.cached_attention import cached_attention, cached_attention_scratch
from emberd.compile.kernels.causal_convolution import causal_convolution
from emberd.compile.kernels.dimensions import Scratch
from emberd.compile.kernels.embedding import embedding
from emberd.compile.kernels.expert_outputs import expert_outputs, expert_outputs_scratch
from emberd.compile.kernels.gated_activation import gated_activation
from emberd.compile.kernels.gated_delta_rule import gated_delta_rule, gated_delta_rule_scratch
from emberd.compile.kernels.gated_sum import gated_sum
from emberd.compile.kernels.gather_experts import gather_experts
from emberd.compile.kernels.integer_attention import (
    integer_attention,
    integer_attention_scratch,
)
from emberd.compile.kernels.linear import linear, linear_scratch
from emberd.compile.kernels.moe import moe, moe_scratch
from emberd.compile.kernels.projections import Projection, projections, projections_scratch
from emberd.compile.kernels.rms_norm import Norm, rms_norm
from emberd.compile.kernels.rotary_embedding import rotary_embedding
from emberd.compile.kernels.router import router
from emberd.compile.kernels.shared_expert import shared_expert, shared_expert_scratch
from emberd.compile.kernels.split import split
from emberd.compile.kernels.weighted_sum import weighted_sum
from emberd.compile.passes.operators import OperatorCall, row_shape, static_shape
from tvm import tirx

Builder = Callable[[Isa], tirx.PrimFunc]
_BUILT: dict[Any, tirx.PrimFunc] = {}  # see _once


@dataclass(frozen=True)
class Kernel:
    """How one operator call is carried out: indices of in-place arguments, and scratch tensors.

    `for_one_token`: the kernel with a state that takes a single token, as rows of a batch do.
    """

    build: Builder
    for_one_token: Builder | None = None
    in_place: tuple[int, ...] = ()
    scratch: tuple[tuple[str, tuple[int, ...]], ...] = ()


def choose_kernel(parsed: OperatorCall) -> Kernel:
    """The kernel of an operator whose formats `quantise` has told."""
    return _CHOICES[parsed.name](parsed)


def _once(kernel: Callable[..., tirx.PrimFunc], **parameters: Any) -> Builder:
    """Builds a kernel once for an instruction set: layers, chunk sizes and models share it."""

    def build(isa: Isa) -> tirx.PrimFunc:
        key = (kernel, isa.name, *sorted(parameters.items()))
        if key not in _BUILT:
            _BUILT[key] = kernel(isa, **parameters)
        return _BUILT[key]

    return build


def _tokens(parsed: OperatorCall) -> tuple[int, int | None]:
    """Rows of the first tensor, and how a kernel is told: 1, or None for any number."""
    rows = static_shape(parsed.tensors[0])[0]
    return rows, 1 if rows == 1 else None


def _linear(parsed: OperatorCall) -> Kernel:
    rows, tokens = _tokens(parsed)
    name, n, k, activations = parsed.scalars
    static: dict[str, Any] = {"format": name, "activations": activations, "n": n, "k": k}
    residual = len(parsed.tensors) == 3
    return Kernel(
        _once(linear, **static, residual=residual, tokens=tokens),
        scratch=tuple(linear_scratch(rows, **static)),
    )


def _projections(parsed: OperatorCall) -> Kernel:
    return _projections_of(parsed, parsed.scalars, None)


def _normed_projections(parsed: OperatorCall) -> Kernel:
    eps, zero_centred, *scalars = parsed.scalars
    return _projections_of(parsed, scalars, Norm(float(eps), bool(zero_centred)))


def _projections_of(parsed: OperatorCall, scalars: list[Any], norm: Norm | None) -> Kernel:
    rows, tokens = _tokens(parsed)
    formats, rows_of, _columns, activations = (scalars[i::4] for i in range(4))
    layers = tuple(map(Projection, formats, activations, rows_of))
    k = static_shape(parsed.tensors[0])[1]
    static: dict[str, Any] = {"layers": layers, "k": k, "norm": norm}
    return Kernel(
        _once(projections, **static, tokens=tokens),
        scratch=tuple(projections_scratch(rows, **static)),
    )


def _embedding(parsed: OperatorCall) -> Kernel:
    _rows, tokens = _tokens(parsed)
    name, vocabulary, hidden = parsed.scalars
    static: dict[str, Any] = {"format": name, "vocabulary": vocabulary, "hidden": hidden}
    return Kernel(_once(embedding, **static, tokens=tokens))


def _block_maxima(parsed: OperatorCall) -> Kernel:
    _rows, tokens = _tokens(parsed)
    columns = static_shape(parsed.tensors[0])[1]
    return Kernel(_once(block_maxima, columns=columns, block=parsed.scalars[0], tokens=tokens))


def _router(parsed: OperatorCall) -> Kernel:
    _rows, tokens = _tokens(parsed)
    experts, hidden = static_shape(parsed.tensors[1])
    static: dict[str, Any] = {"hidden": hidden, "experts": experts, "top_k": parsed.scalars[0]}
    return Kernel(_once(router, **static, tokens=tokens))


def _moe(parsed: OperatorCall) -> Kernel:
    name, hidden, intermediate, experts, activations, *shared = parsed.scalars
    static: dict[str, Any] = {
        "format": name,
        "activations": activations,
        "hidden": hidden,
        "intermediate": intermediate,
        "top_k": static_shape(parsed.tensors[1])[1],
        "shared": shared[0] if shared else None,
    }
    return Kernel(_once(moe, **static, experts=experts), scratch=tuple(moe_scratch(**static)))


def _expert_outputs(parsed: OperatorCall) -> Kernel:
    rows, _one = _tokens(parsed)
    name, hidden, intermediate, experts, activations, top_k = parsed.scalars
    static: dict[str, Any] = {
        "format": name,
        "activations": activations,
        "hidden": hidden,
        "intermediate": intermediate,
        "experts": experts,
        "top_k": top_k,
    }
    scratch = tuple(expert_outputs_scratch(rows, **static))
    return Kernel(_once(expert_outputs, **static), scratch=scratch)


def _shared_expert(parsed: OperatorCall) -> Kernel:
    rows, _one = _tokens(parsed)
    name, hidden, activations, width = parsed.scalars
    static: dict[str, Any] = {
        "format": name,
        "activations": activations,
        "hidden": hidden,
        "width": width,
    }
    scratch = tuple(shared_expert_scratch(rows, **static))
    return Kernel(_once(shared_expert, **static), scratch=scratch)


def _weighted_sum(parsed: OperatorCall) -> Kernel:
    columns, top_k = static_shape(parsed.tensors[0])[1], static_shape(parsed.tensors[1])[1]
    shared = len(parsed.tensors) > 2
    return Kernel(_once(weighted_sum, columns=columns, top_k=top_k, shared=shared))


def _gather_experts(parsed: OperatorCall) -> Kernel:
    _rows, tokens = _tokens(parsed)
    matrix, name, hidden, intermediate, experts = parsed.scalars
    static: dict[str, Any] = {
        "format": name,
        "matrix": matrix,
        "hidden": hidden,
        "intermediate": intermediate,
        "experts": experts,
        "top_k": static_shape(parsed.tensors[0])[1],
    }
    return Kernel(_once(gather_experts, **static, tokens=tokens))


def _rms_norm(parsed: OperatorCall) -> Kernel:
    rows, columns = row_shape(parsed.result)
    eps, zero_centred = parsed.scalars
    static: dict[str, Any] = {
        "columns": columns,
        "eps": float(eps),
        "zero_centred": bool(zero_centred),
        "gated": len(parsed.tensors) == 3,
    }
    return Kernel(_once(rms_norm, **static, rows=1 if rows == 1 else None))


def _split(parsed: OperatorCall) -> Kernel:
    widths = tuple(int(part.shape[-1]) for part in parsed.result.fields)
    rows = math.prod(static_shape(parsed.tensors[0])[:-1])
    return Kernel(_once(split, widths=widths, rows=1 if rows == 1 else None))


def _gated_activation(parsed: OperatorCall) -> Kernel:
    rows, columns = row_shape(parsed.result)
    static: dict[str, Any] = {"kind": parsed.scalars[0], "columns": columns}
    return Kernel(_once(gated_activation, **static, tokens=1 if rows == 1 else None))


def _gated_sum(parsed: OperatorCall) -> Kernel:
    _rows, tokens = _tokens(parsed)
    columns = static_shape(parsed.tensors[1])[1]
    return Kernel(_once(gated_sum, columns=columns, tokens=tokens))


def _causal_convolution(parsed: OperatorCall) -> Kernel:
    _rows, tokens = _tokens(parsed)
    channels, kernel_size = static_shape(parsed.tensors[1])
    static: dict[str, Any] = {"channels": channels, "kernel_size": kernel_size}
    return Kernel(
        _once(causal_convolution, **static, tokens=tokens),
        _once(causal_convolution, **static, tokens=1),
        in_place=(2,),
    )


def _gated_delta_rule(parsed: OperatorCall) -> Kernel:
    rows, tokens = _tokens(parsed)
    names = ("key_heads", "value_heads", "key_dim", "value_dim")
    static: dict[str, Any] = dict(zip(names, parsed.scalars, strict=True))
    return Kernel(
        _once(gated_delta_rule, **static, tokens=tokens),
        _once(gated_delta_rule, **static, tokens=1),
        in_place=(5,),
        scratch=tuple(gated_delta_rule_scratch(rows, **static)),
    )


def _rotary_embedding(parsed: OperatorCall) -> Kernel:
    _rows, tokens = _tokens(parsed)
    _count, heads, head_dim = static_shape(parsed.tensors[0])
    static: dict[str, Any] = {
        "heads": heads,
        "head_dim": head_dim,
        "rotary_dim": parsed.scalars[0],
    }
    return Kernel(_once(rotary_embedding, **static, tokens=tokens))


def _cached_attention(parsed: OperatorCall) -> Kernel:
    rows, tokens = _tokens(parsed)
    _count, query_heads, head_dim = static_shape(parsed.tensors[0])
    cache = parsed.tensors[4].ty
    static: dict[str, Any] = {
        "query_heads": query_heads,
        "kv_heads": int(cache.shape[1]),
        "head_dim": head_dim,
    }
    build: Callable[..., tirx.PrimFunc] = cached_attention
    scratch: Callable[..., Scratch] = cached_attention_scratch
    if str(cache.dtype) != "float32":
        build, scratch = integer_attention, integer_attention_scratch
        static["bits"] = int(str(cache.dtype).removeprefix("int"))
    return Kernel(
        _once(build, **static, tokens=tokens),
        _once(build, **static, tokens=1),
        in_place=(4, 5),
        scratch=tuple(scratch(rows, **static)),
    )


_CHOICES: dict[str, Callable[[OperatorCall], Kernel]] = {
    "linear": _linear,
    "projections": _projections,
    "normed_projections": _normed_projections,
    "embedding": _embedding,
    "block_maxima": _block_maxima,
    "router": _router,
    "moe": _moe,
    "shared_expert": _shared_expert,
    "expert_outputs": _expert_outputs,
    "weighted_sum": _weighted_sum,
    "gather_experts": _gather_experts,
    "rms_norm": _rms_norm,
    "gated_activation": _gated_activation,
    "split": _split,
    "gated_sum": _gated_sum,
    "causal_convolution": _causal_convolution,
    "gated_delta_rule": _gated_delta_rule,
    "rotary_embedding": _rotary_embedding,
    "cached_attention": _cached_attention,
}
