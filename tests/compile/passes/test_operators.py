"""Operators: calls that passes introduce are read back as they were written."""

from __future__ import annotations

from emberd.compile.passes import operators
from relax_functions import function
from tvm import relax
from tvm.relax import op


def test_a_call_is_read_back_as_it_was_written() -> None:
    x, weight = relax.Var("x", operators.tensor([3, 8])), relax.Var("w", operators.tensor([8]))
    call = operators.call("rms_norm", [x, weight], [1e-6, 1, "silu"], operators.tensor([3, 8]))
    parsed = operators.parse(call)
    assert parsed is not None
    assert (parsed.name, parsed.scalars) == ("rms_norm", [1e-6, 1, "silu"])
    assert all(one.same_as(other) for one, other in zip(parsed.tensors, [x, weight], strict=True))
    assert [int(size) for size in parsed.result.shape] == [3, 8]


def test_several_results_are_a_tuple() -> None:
    x = relax.Var("x", operators.tensor([3, 8]))
    result = [operators.tensor([3, 2], "int32"), operators.tensor([3, 2])]
    parsed = operators.parse(operators.call("router", [x], [2], result))
    assert parsed is not None and isinstance(parsed.result, relax.TupleType)
    assert [str(field.dtype) for field in parsed.result.fields] == ["int32", "float32"]


def test_other_calls_are_no_operators() -> None:
    x = relax.Var("x", operators.tensor([3, 8]))
    other = relax.call_pure_packed("somebody.else", x, ty_args=x.ty)
    assert operators.parse(other) is None
    assert operators.parse(op.tanh(x)) is None
    assert operators.parse(x) is None


def test_static_shape_gives_integers() -> None:
    module = function({"x": (3, 8)}, lambda emit, x: op.tanh(x))
    assert operators.static_shape(module["main"].params[0]) == (3, 8)
