"""The head also says what no logit of a block exceeds, so that sampling reads few of them."""

from __future__ import annotations

import tvm
from emberd.compile.passes import operators
from emberd.compile.passes.rewrite import note
from emberd.daemon.program import BOUND_BLOCK
from tvm import relax


def bound_logits() -> tvm.transform.Pass:
    """main -> logits f32[T,V] becomes main -> (logits, block_maxima(logits) f32[T,V/BOUND_BLOCK]).

    For the head, which is of one dataflow block.
    """

    @tvm.transform.module_pass(opt_level=0, name="bound_logits")  # type: ignore[untyped-decorator]
    def run(module: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        main = module["main"]
        (block,) = main.body.blocks
        builder = relax.BlockBuilder()
        with builder.function("main", list(main.params), attrs=dict(main.attrs)):
            with builder.dataflow():
                for binding in block.bindings:
                    builder.emit_normalized(binding)
                logits = main.body.body
                tokens, vocabulary = operators.static_shape(logits)
                kind = operators.tensor([tokens, -(-vocabulary // BOUND_BLOCK)])
                bounds = operators.call("block_maxima", [logits], [BOUND_BLOCK], kind)
                result = builder.emit_output(relax.Tuple([logits, builder.emit(bounds)]))
            builder.emit_func_output(result)
        module = module.clone()
        module.update_func(module.get_global_var("main"), builder.get()["main"])
        return note(module, f"bound_logits: the greatest of every {BOUND_BLOCK} logits")

    return run
