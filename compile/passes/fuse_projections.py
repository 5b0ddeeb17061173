"""Linear layers that read the same input become one operator, launched once."""

from __future__ import annotations

import tvm
from emberd.compile.passes import operators
from emberd.compile.passes.rewrite import note
from tvm import relax


def fuse_projections() -> tvm.transform.Pass:
    """linear(x, W1), linear(x, W2), ... of one x become projections(x, W1, W2, ...).

    Runs behind `quantise`: a weight brings along its format, rows, columns and the precision of its
    activations. A linear layer with a residual stays as it is: its input is another's output.
    """

    @tvm.transform.module_pass(opt_level=0, name="fuse_projections")  # type: ignore[untyped-decorator]
    def run(module: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        groups = _groups(module["main"])
        if not groups:
            return module
        module = module.clone()
        module["main"] = _Fuser(groups).visit_expr(module["main"])
        weights = "; ".join(
            ", ".join(parsed.tensors[1].name for _variable, parsed in group) for group in groups
        )
        line = f"fuse_projections: {len(groups)} x projections of one input ({weights})"
        return note(module, line)

    return run


Group = list[tuple[relax.Var, operators.OperatorCall]]
"""The layers of one input: the variable that each is bound to, and its call."""


def _groups(function: relax.Function) -> list[Group]:
    by_input: dict[relax.Var, Group] = {}
    for block in function.body.blocks:
        for binding in block.bindings:
            parsed = operators.parse(binding.value)
            if parsed is not None and parsed.name == "linear" and len(parsed.tensors) == 2:
                by_input.setdefault(parsed.tensors[0], []).append((binding.var, parsed))
    return [group for group in by_input.values() if len(group) > 1]


@relax.expr_functor.mutator
class _Fuser(relax.PyExprMutator):  # type: ignore[misc]
    """Calls the operator where the first layer of a group was."""

    def __init__(self, groups: list[Group]) -> None:
        super().__init__()
        self._places = {
            variable: (number, position)
            for number, group in enumerate(groups)
            for position, (variable, _parsed) in enumerate(group)
        }
        self._groups = groups
        self._called: dict[int, relax.Var] = {}

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        if binding.var not in self._places:
            super().visit_var_binding_(binding)
            return
        number, position = self._places[binding.var]
        if number not in self._called:
            self._called[number] = self.builder_.emit(self._call(self._groups[number]))
        picked = self.builder_.emit(relax.TupleGetItem(self._called[number], position))
        self.set_var_remap(binding.var, picked)

    def _call(self, group: Group) -> relax.Call:
        x = self.visit_expr(group[0][1].tensors[0])
        weights = [self.visit_expr(parsed.tensors[1]) for _variable, parsed in group]
        scalars = [scalar for _variable, parsed in group for scalar in parsed.scalars]
        results = [parsed.result for _variable, parsed in group]
        return operators.call("projections", [x, *weights], scalars, results)
