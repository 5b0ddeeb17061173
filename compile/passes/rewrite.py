"""What the passes share: pattern building blocks, and a rewrite as a reporting module pass."""

from __future__ import annotations

from collections.abc import Callable

import tvm
from emberd.compile.passes import operators
from tvm import relax
from tvm.ir.expr import GenericConst
from tvm.relax.dpl import DFPattern, is_const, is_op, rewrite_call, wildcard
from tvm.relax.dpl.pattern import ExternFuncPattern

Matches = dict[DFPattern, relax.Expr]
Rewriter = Callable[[relax.Expr, Matches], relax.Expr | None]

_REPORT = "emberd.report"


def note(module: tvm.IRModule, line: str) -> tvm.IRModule:
    """Append a line to the module's report: what a pass did, for people."""
    return module.with_attr(_REPORT, [*report(module), line])


def report(module: tvm.IRModule) -> list[str]:
    """The lines that passes noted so far."""
    if module.attrs is None or _REPORT not in module.attrs:
        return []
    return [str(line) for line in module.attrs[_REPORT]]


def pattern_pass(
    name: str, pattern: DFPattern, rewriter: Rewriter, describe: str
) -> tvm.transform.Pass:
    """A module pass that rewrites every match of `pattern` in `main`, and notes how many.

    The note says where they were: the parameters of `main` that each match reads. `rewriter` gets
    the matched expression and what each sub-pattern matched; it returns the replacement, or None to
    leave this match alone.
    """

    @tvm.transform.module_pass(opt_level=0, name=name)  # type: ignore[untyped-decorator]
    def run(module: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        found: list[str] = []

        def noted(matched: relax.Expr, matches: Matches) -> relax.Expr:
            replacement = rewriter(matched, matches)
            if replacement is None:
                return matched
            parts = {part for part in matches.values() if isinstance(part, relax.Var)}
            read = [parameter.name for parameter in parameters if parameter in parts]
            found.append(", ".join(read) or "intermediate values")
            return replacement

        module = module.clone()
        parameters = list(module["main"].params)
        module["main"] = rewrite_call(pattern, noted, module["main"])
        module = relax.transform.DeadCodeElimination()(module)
        if not found:
            return module
        return note(module, f"{name}: {len(found)} x {describe} ({'; '.join(found)})")

    return run


def commutative(operator: str, left: DFPattern, right: DFPattern) -> DFPattern:
    """`operator(left, right)` in either order."""
    return is_op(operator)(left, right) | is_op(operator)(right, left)


def multiply(left: DFPattern, right: DFPattern) -> DFPattern:
    return commutative("relax.multiply", left, right)


def add(left: DFPattern, right: DFPattern) -> DFPattern:
    return commutative("relax.add", left, right)


def linear(x: DFPattern, weight: DFPattern) -> DFPattern:
    """x f32[.., K] times the transpose of weight f32[N, K]."""
    transposed = is_op("relax.permute_dims")(weight).has_attr({"axes": [1, 0]})
    return is_op("relax.matmul")(x, transposed)


def silu(x: DFPattern) -> DFPattern:
    return multiply(x, is_op("relax.sigmoid")(x))


def operator(name: str, *arguments: DFPattern) -> DFPattern:
    """A call of one of our operators; give a wildcard for each scalar too."""
    return is_op("relax.call_pure_packed")(ExternFuncPattern(operators.PREFIX + name), *arguments)


def constant_value(expression: relax.Expr) -> float | None:
    """The value of a scalar constant, else None."""
    if isinstance(expression, GenericConst) and expression.value.numpy().size == 1:
        return float(expression.value.numpy().reshape(()))
    return None


__all__ = [
    "Matches",
    "add",
    "commutative",
    "constant_value",
    "is_const",
    "is_op",
    "linear",
    "multiply",
    "note",
    "operator",
    "pattern_pass",
    "report",
    "silu",
    "wildcard",
]
