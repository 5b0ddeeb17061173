"""An RMSNorm moves into the linear layers that alone read it: they norm rows as they quantise."""

from __future__ import annotations

import tvm
from emberd.compile.passes import operators
from emberd.compile.passes.rewrite import note
from emberd.compile.quantize.formats import FORMATS, GroupFormat
from tvm import relax


def fuse_normed_projections() -> tvm.transform.Pass:
    """projections(rms_norm(x, w), W1, ...) becomes normed_projections(x, w, W1, ...; eps, ...).

    So does a single linear layer without a residual, as a projection of one. Runs behind
    `fuse_projections`. A norm that others read too, like that of router and experts, stays, and so
    does that of layers which are all of float32: they have nothing to do before they multiply.
    """

    @tvm.transform.module_pass(opt_level=0, name="fuse_normed_projections")  # type: ignore[untyped-decorator]
    def run(module: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        norms = _norms(module["main"])
        if not norms:
            return module
        module = module.clone()
        module["main"] = _Fuser(norms).visit_expr(module["main"])
        weights = ", ".join(norm.tensors[1].name for norm in norms.values())
        return note(module, f"fuse_normed_projections: {len(norms)} x RMSNorm ({weights})")

    return run


def _norms(function: relax.Function) -> dict[relax.Var, operators.OperatorCall]:
    """The norms that move, by the variable that each is bound to."""
    bindings = [binding for block in function.body.blocks for binding in block.bindings]
    readers: dict[relax.Var, list[relax.Expr]] = {}
    for value in [*(binding.value for binding in bindings), function.body.body]:
        for variable in relax.analysis.free_vars(value):
            readers.setdefault(variable, []).append(value)
    found = {}
    for binding in bindings:
        norm = operators.parse(binding.value)
        if norm is None or norm.name != "rms_norm" or len(norm.tensors) != 2:
            continue
        (reader, *others) = readers[binding.var]
        if not others and _quantises(reader, binding.var):
            found[binding.var] = norm
    return found


def _quantises(reader: relax.Expr, x: relax.Var) -> bool:
    """Whether it is linear layers of x, of which one is quantised at least."""
    parsed = operators.parse(reader)
    if parsed is None or parsed.name not in ("linear", "projections"):
        return False
    layers = [FORMATS[str(name)] for name in parsed.scalars[::4]]
    plain = len(parsed.tensors) == 1 + len(layers) and parsed.tensors[0].same_as(x)
    return plain and any(isinstance(layer, GroupFormat) for layer in layers)


@relax.expr_functor.mutator
class _Fuser(relax.PyExprMutator):  # type: ignore[misc]
    def __init__(self, norms: dict[relax.Var, operators.OperatorCall]) -> None:
        super().__init__()
        self._norms = norms

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        if binding.var not in self._norms:
            super().visit_var_binding_(binding)

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        parsed = operators.parse(call)
        if parsed is None or parsed.tensors[0] not in self._norms:
            return super().visit_call_(call)
        norm = self._norms[parsed.tensors[0]]
        tensors = [self.visit_expr(tensor) for tensor in [*norm.tensors, *parsed.tensors[1:]]]
        scalars = [*norm.scalars, *parsed.scalars]
        return operators.call("normed_projections", tensors, scalars, parsed.result)
