"""pattern_pass: matches are rewritten, counted and placed; the report grows a line a pass."""

from __future__ import annotations

from typing import Any

from emberd.compile.passes.rewrite import (
    Matches,
    constant_value,
    is_op,
    note,
    pattern_pass,
    report,
    wildcard,
)
from relax_functions import calls, function
from tvm import relax
from tvm.relax import op


def _body(emit: Any, x: Any, y: Any) -> Any:
    return op.add(op.exp(x), op.exp(op.add(emit(op.exp(y)), y)))


def test_matches_are_counted_and_named_by_the_parameters_that_they_read() -> None:
    argument = wildcard()
    rewrite = pattern_pass(
        "gentle", is_op("relax.exp")(argument), lambda _, matches: op.tanh(matches[argument]), "exp"
    )
    module = rewrite(function({"x": (3,), "y": (3,)}, _body))
    assert "relax.exp" not in calls(module) and calls(module).count("relax.tanh") == 3
    (line,) = report(module)
    assert line.startswith("gentle: 3 x exp (")
    assert sorted(line.removesuffix(")").split(" (")[1].split("; ")) == [
        "intermediate values",
        "x",
        "y",
    ]


def test_a_refused_match_is_neither_rewritten_nor_counted() -> None:
    argument = wildcard()

    def only_parameters(_matched: relax.Expr, matches: Matches) -> relax.Expr | None:
        found = matches[argument]
        return op.tanh(found) if isinstance(found, relax.Var) else None

    rewrite = pattern_pass("picky", is_op("relax.exp")(argument), only_parameters, "exp")
    module = rewrite(function({"x": (3,), "y": (3,)}, _body))
    assert calls(module).count("relax.exp") == 1
    assert report(module)[0].startswith("picky: 2 x exp")


def test_a_pass_that_finds_nothing_reports_nothing() -> None:
    rewrite = pattern_pass("idle", is_op("relax.tanh")(wildcard()), lambda found, _: found, "tanh")
    assert report(rewrite(function({"x": (3,), "y": (3,)}, _body))) == []


def test_notes_are_kept_in_order() -> None:
    module = function({"x": (3,), "y": (3,)}, _body)
    assert report(note(note(module, "first"), "second")) == ["first", "second"]
    assert report(module) == []


def test_constants_are_numbers_and_nothing_else_is() -> None:
    assert constant_value(relax.const(0.5, "float32")) == 0.5
    assert constant_value(relax.const([1.0, 2.0], "float32")) is None
    assert constant_value(relax.const([[3.0]], "float32")) == 3.0
    assert constant_value(relax.Var("x", relax.TensorType([1], "float32"))) is None
