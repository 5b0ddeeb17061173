"""Small Relax functions for tests of passes: built from expressions, and run on numpy arrays.

The operators that passes introduce are carried out by the numpy references of their kernels, so
that a module means the same before and after a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tvm
from emberd.compile.kernels import (
    block_maxima,
    embedding,
    gated_activation,
    gated_sum,
    gather_experts,
    linear,
    moe,
    rms_norm,
    router,
    shared_expert,
)
from emberd.compile.passes import operators
from emberd.compile.quantize.formats import FORMATS, unpack_expert
from tvm import relax

Array = np.ndarray


def function(
    parameters: dict[str, relax.Type | Sequence[int]], body: Callable[..., Any]
) -> tvm.IRModule:
    """A module whose `main` returns body(emit, *parameters); a shape stands for a float32 tensor.

    `emit` binds an expression to a variable, for those that are used more than once. The body
    returns one expression or a tuple of them.
    """
    builder = relax.BlockBuilder()
    variables = [
        relax.Var(name, kind if isinstance(kind, relax.Type) else operators.tensor(kind))
        for name, kind in parameters.items()
    ]
    with builder.function("main", variables):
        with builder.dataflow():
            result = body(builder.emit, *variables)
            if isinstance(result, tuple):
                result = relax.Tuple([builder.emit(part) for part in result])
            output = builder.emit_output(result)
        builder.emit_func_output(output)
    return builder.finalize()


def calls(module: tvm.IRModule) -> list[str]:
    """What `main` calls, in order: names of our operators (emberd.x) and of Relax (relax.x)."""
    found = []
    for block in module["main"].body.blocks:
        for binding in block.bindings:
            if isinstance(binding.value, relax.Call):
                parsed = operators.parse(binding.value)
                name = str(binding.value.op.name)
                found.append(name if parsed is None else operators.PREFIX + parsed.name)
    return found


def run(module: tvm.IRModule, *arguments: Array, target: object = "llvm") -> Any:
    """The result of `main`: an array, or a list of them."""
    machine = relax.VirtualMachine(relax.build(module, tvm.target.Target(target)), tvm.cpu())
    result = machine["main"](*(tvm.runtime.tensor(array) for array in arguments))
    if isinstance(result, tvm.runtime.Tensor):
        return result.numpy()
    return [part.numpy() for part in result]


def agree(first: tvm.IRModule, second: tvm.IRModule, *arguments: Array) -> bool:
    """Whether both compute the same but for rounding, and something that is not zero."""
    pairs = [run(module, *arguments) for module in (first, second)]
    expected, got = ([pair] if isinstance(pair, np.ndarray) else pair for pair in pairs)
    return len(expected) == len(got) and all(
        np.abs(one).max() > 0 and np.allclose(other, one, rtol=1e-4, atol=1e-5)
        for one, other in zip(expected, got, strict=True)
    )


def random(*shape: int, seed: int = 0) -> Array:
    """Standard normal float32."""
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(np.float32)


def _weight(weight: Array, scalars: Sequence[Any]) -> Array:
    """The matrix of a linear or embedding; `quantise` adds format, rows and columns."""
    if not scalars or scalars[0] == "f32":
        return weight
    name, rows, columns, *_more = scalars
    return FORMATS[name].unpack(weight, rows, columns)


def _experts(table: Array, bank: Array, scalars: Sequence[Any]) -> tuple[Array, Array]:
    name, hidden, intermediate, *_more = scalars
    pairs = [unpack_expert(FORMATS[name], bank[slot], hidden, intermediate) for slot in table]
    return np.stack([gate_up for gate_up, _down in pairs]), np.stack([down for _, down in pairs])


def _moe(tensors: Sequence[Array], scalars: Sequence[Any]) -> Array:
    x, ids, weights, _scores, *shared, first, second = tensors
    gate_up, down = _experts(first, second, scalars) if scalars else (first, second)
    routed = moe.reference(x, ids, weights, gate_up, down, lambda values: values)
    if not shared:
        return routed
    *packed, expert_gate, residual = shared
    name, hidden, *_rest, width = scalars
    shapes = [(width, hidden), (width, hidden), (hidden, width)]
    matrices = [
        _weight(weight, [name, *shape]) for weight, shape in zip(packed, shapes, strict=True)
    ]
    scales, output = shared_expert.reference(x, *matrices, expert_gate, lambda values: values)
    return residual + (routed + scales * output)


def _gather_experts(tensors: Sequence[Array], scalars: Sequence[Any]) -> Array:
    ids, *experts = tensors
    if not scalars:
        return gather_experts.reference(ids, experts[0])
    matrix, *rest = scalars
    gate_up, down = _experts(*experts, rest)
    return gather_experts.reference(ids, gate_up if matrix == "gate_up" else down)


def _linear(tensors: Sequence[Array], scalars: Sequence[Any]) -> Array:
    x, weight, *residual = tensors
    return linear.reference(x, _weight(weight, scalars), *residual)


def _projections(tensors: Sequence[Array], scalars: Sequence[Any]) -> tuple[Array, ...]:
    x, *weights = tensors
    return tuple(
        linear.reference(x, _weight(weight, scalars[4 * i : 4 * i + 3]))
        for i, weight in enumerate(weights)
    )


def _normed_projections(tensors: Sequence[Array], scalars: Sequence[Any]) -> Any:
    x, weight, *weights = tensors
    eps, zero_centred, *layers = scalars
    normed = rms_norm.reference(x, weight, eps=eps, zero_centred=bool(zero_centred))
    outputs = _projections([normed.astype(np.float32), *weights], layers)
    return outputs if len(outputs) > 1 else outputs[0]


_REFERENCES: dict[str, Callable[[Sequence[Array], Sequence[Any]], Any]] = {
    "block_maxima": lambda t, s: block_maxima.reference(*t, s[0]),
    "embedding": lambda t, s: embedding.reference(t[0], _weight(t[1], s)),
    "gated_activation": lambda t, s: gated_activation.reference(*t, kind=s[0]),
    "gated_sum": lambda t, s: gated_sum.reference(*t),
    "gather_experts": _gather_experts,
    "linear": _linear,
    "moe": _moe,
    "normed_projections": _normed_projections,
    "projections": _projections,
    "rms_norm": lambda t, s: rms_norm.reference(*t, eps=s[0], zero_centred=bool(s[1])),
    "router": lambda t, s: router.reference(*t, s[0]),
}


def _register(name: str, reference: Callable[[Sequence[Array], Sequence[Any]], Any]) -> None:
    def call(*arguments: Any) -> Any:
        tensors = [a.numpy() for a in arguments if isinstance(a, tvm.runtime.Tensor)]
        scalars = [a for a in arguments if not isinstance(a, tvm.runtime.Tensor)]
        result = reference(tensors, scalars)
        if isinstance(result, tuple):
            return [tvm.runtime.tensor(part) for part in result]
        return tvm.runtime.tensor(result.astype(np.float32))

    tvm.register_global_func(operators.PREFIX + name, call, override=True)


for _name, _reference in _REFERENCES.items():
    _register(_name, _reference)
