"""The pass that writes outputs over the states that they replace."""

from __future__ import annotations

import numpy as np
from needs import needs

needs("tvm")

import tvm  # noqa: E402
from emberd.compile.block_program import extract  # noqa: E402
from emberd.compile.isa.isa import host_isas  # noqa: E402
from emberd.compile.passes.keep_state import keep_state  # noqa: E402
from emberd.compile.passes.plan_memory import lower_remaining, plan_memory  # noqa: E402
from tvm import relax  # noqa: E402


def counting() -> tvm.IRModule:
    """count_out = count + x, before the count as it was is read for y = 2 count."""
    x, count = (relax.Var(name, relax.TensorType((1, 4), "float32")) for name in ("x", "count"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x, count], attrs={"num_input": 2}):
        with builder.dataflow():
            new = builder.emit(relax.op.add(count, x))
            y = builder.emit(relax.op.multiply(count, relax.const(2.0)))
            result = builder.emit_output(relax.Tuple([y, new]))
        builder.emit_func_output(result)
    return builder.get()


def test_a_state_is_overwritten_when_it_was_read() -> None:
    module = keep_state(["y", "count_out"])(counting())
    assert int(module["main"].attrs["num_input"]) == 2
    target = tvm.target.Target(host_isas()[0].target)
    with target:
        module = plan_memory()(lower_remaining()(module))
    machine = relax.VirtualMachine(tvm.compile(module, target), tvm.cpu())
    x = tvm.runtime.tensor(np.float32([[1, 2, 3, 4]]))
    count = tvm.runtime.tensor(np.zeros((1, 4), np.float32))
    for times in (1, 2, 3):
        y, _count = machine["main"](x, count)
        np.testing.assert_array_equal(y.numpy(), (2 * (times - 1) * x.numpy()))
        np.testing.assert_array_equal(count.numpy(), times * x.numpy())


def test_only_other_outputs_need_a_place() -> None:
    with tvm.target.Target(host_isas()[0].target):
        module = plan_memory()(lower_remaining()(keep_state(["y", "count_out"])(counting())))
    calls = extract(module, 1, {}).calls
    written = [arguments[0 if "overwrite" in name else -1].storage for name, arguments in calls]
    assert written.count("output") == 1 and written[-1] == "count"
