"""The operators that passes introduce between ONNX and kernels.

In the IR an operator is a call of a pure packed function `emberd.<name>` with its tensors first and
its static parameters behind them. `lower_kernels` later replaces each by a call of a TIR kernel, so
that no pass in between has to know instruction sets or scratch memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import tvm
from tvm import relax

PREFIX = "emberd."
Scalar = int | float | str


@dataclass(frozen=True)
class OperatorCall:
    """An operator call taken apart: tensors are Relax expressions, scalars plain Python values."""

    name: str
    tensors: list[relax.Expr]
    scalars: list[Scalar]
    result: relax.Type


def tensor(shape: Sequence[object], dtype: str = "float32") -> relax.TensorType:
    """A Relax tensor type; dimensions may be integers or symbolic expressions."""
    return relax.TensorType(shape, dtype)


def call(
    name: str,
    tensors: Sequence[relax.Expr],
    scalars: Sequence[Scalar],
    result: relax.Type | list[relax.Type],
) -> relax.Call:
    """Build the call of operator `name`; `result` is its type (a list for several outputs)."""
    result_type = relax.TupleType(result) if isinstance(result, list) else result
    return relax.call_pure_packed(PREFIX + name, *tensors, *scalars, ty_args=result_type)


def parse(expression: relax.Expr) -> OperatorCall | None:
    """Take an operator call apart; None when `expression` is anything else."""
    if not isinstance(expression, relax.Call) or not isinstance(expression.op, tvm.ir.Op):
        return None
    if expression.op.name != "relax.call_pure_packed":
        return None
    function, *arguments = expression.args
    if not str(function.global_symbol).startswith(PREFIX):
        return None
    tensors = [argument for argument in arguments if not _is_scalar(argument)]
    scalars = [scalar(argument) for argument in arguments if _is_scalar(argument)]
    name = str(function.global_symbol).removeprefix(PREFIX)
    return OperatorCall(name, tensors, scalars, expression.ty_args[0])


def scalar(expression: tvm.ir.StringImm | tvm.tirx.IntImm | tvm.tirx.FloatImm) -> Scalar:
    """The value of a static parameter."""
    if isinstance(expression, tvm.ir.StringImm):
        return str(expression.value)
    if isinstance(expression, tvm.tirx.IntImm):
        return int(expression.value)
    return float(expression.value)


def static_shape(expression: relax.Expr) -> tuple[int, ...]:
    """The shape of a tensor whose dimensions are all known integers."""
    return tuple(int(dimension) for dimension in expression.ty.shape)


def row_shape(kind: relax.TensorType) -> tuple[int, int]:
    """Rows and columns of a tensor seen as a matrix: all dimensions before the last are rows."""
    *before, columns = (int(size) for size in kind.shape)
    return math.prod(before), columns


def _is_scalar(expression: object) -> bool:
    return isinstance(expression, tvm.ir.StringImm | tvm.tirx.IntImm | tvm.tirx.FloatImm)
