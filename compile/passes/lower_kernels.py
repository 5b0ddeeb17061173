"""Our operators become calls of TIR kernels, with their scratch memory as further outputs."""

from __future__ import annotations

import math

import tvm
from emberd.compile.isa.isa import Isa
from emberd.compile.kernels.dimensions import dimension, token_suffix
from emberd.compile.passes import operators
from emberd.compile.passes.kernel_choice import Builder, choose_kernel
from emberd.compile.passes.operators import OperatorCall, row_shape, static_shape
from tvm import relax, tirx
from tvm.script import tirx as T  # noqa: N812
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder.tirx import prim_func

ACQUIRE_EXPERTS = "acquire_experts"
# Operators that end in a table and a bank: where their ids are, with weights and scores if any.
_ROUTING = {"moe": slice(1, 4), "gather_experts": slice(0, 1)}
_OPAQUE = 8  # Relax's pattern kind of what must not be fused


class KernelLibrary:
    """The kernels that programs call, by symbol; the same for every instruction set.

    `of_one_token`: for a kernel with a state, the one that does the same for a single token.
    `in_waves`: those that take the acquired experts a part after the other.
    """

    def __init__(self) -> None:
        self.builders: dict[str, Builder] = {}
        self.of_one_token: dict[str, str] = {}
        self.in_waves: set[str] = set()


def lower_kernels(isa: Isa, library: KernelLibrary) -> tvm.transform.Pass:
    """Lower every operator of a block; the kernels it needs are added to `library`.

    `isa` only gives the IR its bodies: signatures and scratch are the same for all.
    """

    @tvm.transform.module_pass(opt_level=0, name="lower_kernels")  # type: ignore[untyped-decorator]
    def run(module: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        lowering = _Lowering(module, isa, library)
        lowered = lowering.visit_expr(module["main"])
        lowering.builder_.update_func(module.get_global_var("main"), lowered)
        return lowering.builder_.get()

    return run


@relax.expr_functor.mutator
class _Lowering(relax.PyExprMutator):  # type: ignore[misc]
    def __init__(self, module: tvm.IRModule, isa: Isa, library: KernelLibrary) -> None:
        super().__init__(module)
        self._isa, self._library = isa, library
        self._variables: dict[str, relax.GlobalVar] = {}
        self._acquired: dict[relax.Var, relax.Var] = {}  # ids: the same once resident

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = super().visit_call_(call)
        parsed = operators.parse(call) or _parse_split(call)
        if parsed is None:
            return call
        if parsed.name in _ROUTING:
            self._acquire(parsed)
        if parsed.name == "moe" and static_shape(parsed.tensors[0])[0] > 1:
            return self._lower_in_waves(parsed)
        return self._lower(parsed)

    def _lower_in_waves(self, parsed: OperatorCall) -> relax.Expr:
        """For many tokens, outputs of experts and their weighted sum are kernels of their own.

        So is a shared expert, before them: meanwhile experts may be read from the disk.
        """
        x, ids, weights, *shared, table, bank = parsed.tensors
        if shared:
            *shared_weights, residual = shared
            name, hidden, _intermediate, _experts, activations, width = parsed.scalars
            parts = [operators.tensor([static_shape(x)[0], 1]), parsed.result]
            call = OperatorCall(
                "shared_expert",
                [x, *shared_weights],
                [name, hidden, activations, width],
                relax.TupleType(parts),
            )
            scaled = [self.builder_.emit(part) for part in self._lower(call).fields]
            shared = [*scaled, residual]
        pairs = operators.tensor([math.prod(static_shape(ids)), static_shape(x)[1]])
        scalars = [*parsed.scalars[:5], static_shape(ids)[1]]
        call = OperatorCall("expert_outputs", [x, ids, table, bank], scalars, pairs)
        outputs = self.builder_.emit(self._lower(call))
        return self._lower(
            OperatorCall("weighted_sum", [outputs, weights, *shared], [], parsed.result)
        )

    def _lower(self, parsed: OperatorCall) -> relax.Expr:
        arguments, result = _flatten_rows(self.builder_, parsed)
        kernel = choose_kernel(parsed)
        outputs = list(result.fields) if isinstance(result, relax.TupleType) else [result]
        # A kernel's results are its own outputs first; the operator lists states last.
        states = len(kernel.in_place)
        own, updated = outputs[: len(outputs) - states], outputs[len(outputs) - states :]
        scratch = [operators.tensor(shape, dtype) for dtype, shape in kernel.scratch]
        types = [*updated, *own, *scratch]
        variable = self._variable(kernel.build)
        if parsed.name == "expert_outputs":
            self._library.in_waves.add(str(variable.name_hint))
        if kernel.for_one_token is not None:
            self._add_for_one_token(str(variable.name_hint), kernel.for_one_token)
        if states:
            indices = [*kernel.in_place, *[-1] * (len(own) + len(scratch))]
            lowered = relax.op.call_tir_inplace(variable, arguments, indices, types)
        else:
            lowered = relax.call_tir(variable, relax.Tuple(arguments), types)
        if len(types) == 1:
            return _restore_rows(self.builder_, lowered, parsed)
        emitted = self.builder_.emit(lowered)
        picked = [relax.TupleGetItem(emitted, states + i) for i in range(len(own))]
        picked += [relax.TupleGetItem(emitted, i) for i in range(states)]
        if parsed.name == "split":
            picked = [
                self.builder_.emit(relax.op.reshape(self.builder_.emit(part), whole.shape))
                for part, whole in zip(picked, parsed.result.fields, strict=True)
            ]
        return picked[0] if len(picked) == 1 else relax.Tuple(picked)

    def _acquire(self, parsed: OperatorCall) -> None:
        """Between router and experts the core makes the chosen experts resident, once. Of what the
        router said, the kernels get ids and weights."""
        routing = _ROUTING[parsed.name]
        routed = parsed.tensors[routing]
        ids, table, bank = routed[0], *parsed.tensors[-2:]
        if ids not in self._acquired:
            variable = self._variable(lambda _isa: _acquire_experts(routed, table, bank))
            call = relax.op.call_tir_inplace(variable, [*routed, table, bank], [0], [ids.ty])
            self._acquired[ids] = self.builder_.emit(call)
        parsed.tensors[routing] = [self._acquired[ids], *routed[1:2]]

    def _add_for_one_token(self, symbol: str, build: Builder) -> None:
        single = str(build(self._isa).attrs["global_symbol"])
        self._library.builders.setdefault(single, build)
        self._library.of_one_token[symbol] = single

    def _variable(self, build: Builder) -> relax.GlobalVar:
        function = build(self._isa)
        symbol = str(function.attrs["global_symbol"])
        if symbol not in self._variables:
            self._variables[symbol] = self.builder_.add_func(function, symbol)
            if not symbol.startswith(ACQUIRE_EXPERTS):
                self._library.builders.setdefault(symbol, build)
        return self._variables[symbol]


def _acquire_experts(
    routed: list[relax.Expr], table: relax.Expr, bank: relax.Expr
) -> tirx.PrimFunc:
    """Stands for the core's step in the IR: it keeps its arguments alive and ordered. `routed`:
    ids, alone or with the router's weights and scores, which the core traces and weighs."""
    tokens, top_k = static_shape(routed[0])
    with IRBuilder() as builder, prim_func(s_tir=True):
        rows = dimension("tokens", 1 if tokens == 1 else None)
        name = f"{ACQUIRE_EXPERTS}_k{top_k}_{token_suffix(1 if tokens == 1 else None)}"
        if len(routed) == 1:
            name += "_unweighted"
        T.func_name(name)
        T.func_attr({"global_symbol": name, "op_pattern": _OPAQUE})
        chosen = T.arg("ids", T.buffer((rows, top_k), "int32"))
        for other, argument in zip(("weights", "scores"), routed[1:], strict=False):
            T.arg(other, T.buffer((rows, static_shape(argument)[1]), "float32"))
        T.arg("expert_table", T.buffer(static_shape(table), "int32"))
        slots = tirx.Var("slots", "int64")
        T.arg("bank", T.buffer((slots, int(bank.ty.shape[1])), "uint8"))
        with T.sblock("root"), T.serial(0, 1):
            T.buffer_store(chosen, chosen[0, 0], [0, 0])
    return builder.get()


def _parse_split(call: relax.Expr) -> OperatorCall | None:
    """A standard split of the last dimension, which lowered as it stands would take as many tokens
    as it was compiled for, however few there are."""
    if not isinstance(call, relax.Call) or call.op != tvm.ir.Op.get("relax.split"):
        return None
    (x,) = call.args
    last = len(x.ty.shape) - 1
    if int(call.attrs.axis) % (last + 1) != last:
        return None
    return OperatorCall("split", [x], [], call.ty)


def _flatten_rows(
    builder: relax.BlockBuilder, parsed: OperatorCall
) -> tuple[list[relax.Expr], relax.Type]:
    """Norms, activations and splits work on rows, whatever the dimensions before the last."""
    if parsed.name == "split":
        *before, columns = static_shape(parsed.tensors[0])
        rows = math.prod(before)
        flat = builder.emit(relax.op.reshape(parsed.tensors[0], (rows, columns)))
        widths = [int(part.shape[-1]) for part in parsed.result.fields]
        return [flat], relax.TupleType([operators.tensor([rows, width]) for width in widths])
    if parsed.name not in ("rms_norm", "gated_activation") or len(parsed.result.shape) == 2:
        return parsed.tensors, parsed.result
    rows, columns = row_shape(parsed.result)
    tensors = [
        tensor
        if len(tensor.ty.shape) == 1
        else builder.emit(relax.op.reshape(tensor, (rows, columns)))
        for tensor in parsed.tensors
    ]
    return tensors, operators.tensor([rows, columns])


def _restore_rows(
    builder: relax.BlockBuilder, lowered: relax.Expr, parsed: OperatorCall
) -> relax.Expr:
    if parsed.name not in ("rms_norm", "gated_activation") or len(parsed.result.shape) == 2:
        return lowered
    return relax.op.reshape(builder.emit(lowered), parsed.result.shape)
