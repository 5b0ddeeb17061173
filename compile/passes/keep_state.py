"""States of a graph in standard operators are updated in place, as those of our operators are."""

from __future__ import annotations

from collections.abc import Sequence

import tvm
from emberd.compile.isa.vector import PrimFunc, kernel
from emberd.compile.passes.operators import static_shape
from tvm import relax
from tvm.script import tirx as T  # noqa: N812

_UPDATED = "_out"  # what the name of a state ends in once it is updated
_OPAQUE = 8  # Relax's pattern kind of what must not be fused


def keep_state(outputs: Sequence[str]) -> tvm.transform.Pass:
    """What `main` returns as `X_out` is written over its parameter X when all the rest is done.

    `outputs`: the names of the tuple that `main` returns, which is alone and of one dataflow block;
    a state is float32, of a static shape.
    """

    @tvm.transform.module_pass(opt_level=0, name="keep_state")  # type: ignore[untyped-decorator]
    def run(module: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        main = module["main"]
        (block,) = main.body.blocks
        *bindings, returned = block.bindings
        states = {f"{parameter.name}{_UPDATED}": parameter for parameter in main.params}
        builder = relax.BlockBuilder()
        with builder.function("main", list(main.params), attrs=dict(main.attrs)):
            with builder.dataflow():
                for binding in bindings:
                    builder.emit_normalized(binding)
                values = [
                    _overwrite(builder, states[name], value) if name in states else value
                    for name, value in zip(outputs, returned.value.fields, strict=True)
                ]
                result = builder.emit_output(relax.Tuple(values))
            builder.emit_func_output(result)
        return builder.get()

    return run


def _overwrite(builder: relax.BlockBuilder, state: relax.Var, value: relax.Expr) -> relax.Var:
    shape = static_shape(state)
    name = f"overwrite_{'x'.join(map(str, shape))}"
    variable = builder.add_func(_copy(name, shape), name)
    return builder.emit(relax.op.call_tir_inplace(variable, [state, value], [0], state.ty))


def _copy(name: str, shape: Sequence[int]) -> PrimFunc:
    """state f32[shape] = value f32[shape]."""
    with kernel(name) as builder:
        T.func_attr({"op_pattern": _OPAQUE})
        state = T.arg("state", T.buffer(shape, "float32"))
        value = T.arg("value", T.buffer(shape, "float32"))
        with T.sblock("root"), T.grid(*shape) as index:
            at = [index] if len(shape) == 1 else list(index)
            T.buffer_store(state, value[tuple(at)], at)
    return builder.get()
