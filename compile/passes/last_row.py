"""The row of the last token, for when only its logits are asked for."""

from __future__ import annotations

import tvm
from emberd.compile.passes import operators
from tvm import relax

LAST_ROW = "last_row"


def last_row(tokens: int, hidden_size: int) -> tvm.IRModule:
    """A module like those of `import_onnx`: hidden f32[tokens, hidden_size] -> its last row.

    A copy, because kernels take tensors that are 64-byte aligned; a row inside a matrix is only
    where 16 divides the hidden size.
    """
    builder = relax.BlockBuilder()
    hidden = relax.Var("hidden", operators.tensor([tokens, hidden_size]))
    with builder.function("main", [hidden]):
        with builder.dataflow():
            last = relax.op.strided_slice(hidden, [0], [tokens - 1], [tokens])
            row = builder.emit_output(last)
        builder.emit_func_output(row)
    return builder.get()
