"""Weights take the formats of a recipe: the blocks' parameters become packed bytes."""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from emberd.compile.passes import operators
from emberd.compile.passes.rewrite import note
from emberd.compile.quantize.formats import FORMATS, expert_bytes
from emberd.compile.quantize.recipes import Recipe
from tvm import relax

BANK, EXPERT_TABLE = "expert_bank", "expert_table"
_WEIGHT_ARGUMENT = {"linear": 1, "embedding": 1}
_EXPERT_MATRICES = {"experts_gate_up": "gate_up", "experts_down": "down"}


def quantise(recipe: Recipe, block: str) -> tvm.transform.Pass:
    """Give each weight of `block` its format.

    The weight of a `linear` or `embedding` becomes uint8[packed_bytes] unless it stays f32, and the
    operator learns the format. The expert weights of a `moe` or of `gather_experts` become the bank
    uint8[S, expert_bytes] and the table i32[E] from expert id to blob. `linear` and `moe` learn the
    precision of their activations. Every format must be able to take its weights, which `build`
    checks before any pass runs.
    """

    @tvm.transform.module_pass(opt_level=0, name="quantise")  # type: ignore[untyped-decorator]
    def run(module: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        function = module["main"]
        mutator = _Quantiser(recipe, block, function)
        module = module.clone()
        module["main"] = mutator.rewrite(function)
        counts = ", ".join(f"{name} x {count}" for name, count in sorted(mutator.counts.items()))
        return note(module, f"quantise: {counts}") if counts else module

    return run


@dataclass(frozen=True)
class _Bank:
    """What an operator over experts takes instead of their weights."""

    tensors: list[relax.Expr]  # table, bank
    scalars: list[operators.Scalar]  # format, hidden, intermediate, experts


@relax.expr_functor.mutator
class _Quantiser(relax.PyExprMutator):  # type: ignore[misc]
    def __init__(self, recipe: Recipe, block: str, function: relax.Function) -> None:
        super().__init__()
        self._recipe, self._block = recipe, block
        self._replaced: dict[str, relax.Var] = {}
        self.counts: dict[str, int] = {}

    def rewrite(self, function: relax.Function) -> relax.Function:
        body = self.visit_expr(function.body)
        parameters: list[relax.Var] = []
        for parameter in function.params:
            if parameter.name == "experts_gate_up" and BANK in self._replaced:
                parameters += [self._replaced[EXPERT_TABLE], self._replaced[BANK]]
            elif parameter.name == "experts_down" and BANK in self._replaced:
                continue
            else:
                parameters.append(self._replaced.get(parameter.name, parameter))
        return relax.Function(parameters, body, function.ret_ty, attrs=function.attrs)

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = super().visit_call_(call)
        parsed = operators.parse(call)
        if parsed is None:
            return call
        if parsed.name == "moe":
            return self._moe(parsed)
        if parsed.name == "gather_experts":
            return self._gather_experts(parsed)
        if parsed.name in _WEIGHT_ARGUMENT:
            return self._matrix(parsed)
        return call

    def _matrix(self, parsed: operators.OperatorCall) -> relax.Call:
        position = _WEIGHT_ARGUMENT[parsed.name]
        weight = parsed.tensors[position]
        rows, columns = operators.static_shape(weight)
        name = self._recipe.format_of(self._block, weight.name)
        self.counts[name] = self.counts.get(name, 0) + 1
        tensors = list(parsed.tensors)
        if name != "f32":
            size = FORMATS[name].packed_bytes(rows, columns)
            tensors[position] = self._parameter(weight.name, operators.tensor([size], "uint8"))
        scalars: list[operators.Scalar] = [name, rows, columns]
        if parsed.name == "linear":
            scalars.append(self._recipe.activations_of(self._block, weight.name))
        return operators.call(parsed.name, tensors, scalars, parsed.result)

    def _moe(self, parsed: operators.OperatorCall) -> relax.Call:
        *routed, gate_up, down = parsed.tensors
        experts, doubled, hidden = operators.static_shape(gate_up)
        bank = self._bank(down.name, experts, hidden, doubled // 2)
        tensors = [*routed, *bank.tensors]
        scalars = [*bank.scalars, self._recipe.activations_of(self._block, down.name)]
        return operators.call("moe", tensors, scalars, parsed.result)

    def _gather_experts(self, parsed: operators.OperatorCall) -> relax.Call:
        ids, weights = parsed.tensors
        matrix = _EXPERT_MATRICES[weights.name]
        experts, rows, columns = operators.static_shape(weights)
        hidden, intermediate = (columns, rows // 2) if matrix == "gate_up" else (rows, columns)
        bank = self._bank(weights.name, experts, hidden, intermediate)
        scalars = [matrix, *bank.scalars]
        return operators.call("gather_experts", [ids, *bank.tensors], scalars, parsed.result)

    def _bank(self, weights: str, experts: int, hidden: int, intermediate: int) -> _Bank:
        name = self._recipe.format_of(self._block, weights)
        self.counts[name] = self.counts.get(name, 0) + 1
        blob = expert_bytes(FORMATS[name], hidden, intermediate)
        table = self._parameter(EXPERT_TABLE, operators.tensor([experts], "int32"))
        slots = tvm.tirx.Var("slots", "int64")
        bank = self._parameter(BANK, operators.tensor([slots, blob], "uint8"))
        return _Bank([table, bank], [name, hidden, intermediate, experts])

    def _parameter(self, name: str, kind: relax.Type) -> relax.Var:
        return self._replaced.setdefault(name, relax.Var(name, kind))
