"""moa_fusion takes every mixture of experts of its pattern, of any size, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnxruntime
import pytest
import tvm
from emberd.compile.blocks import BLOCKS
from emberd.compile.dimensions import Dimensions, MoeDimensions
from emberd.compile.passes.fuse_rms_norm import fuse_rms_norm
from emberd.compile.passes.import_onnx import import_onnx
from emberd.compile.passes.moa_fusion import moa_fusion
from emberd.compile.passes.rewrite import report
from emberd.compile.passes.simplify_gather import simplify_gather
from relax_functions import calls, function, random, run
from tvm import relax
from tvm.relax import op

SMALL = MoeDimensions(experts=8, top_k=2, intermediate_size=32, shared_intermediate_size=64)
TOKENS, EXPERTS, HIDDEN, TOP_K = 3, 4, 5, 2  # of the mixture written by hand


def _dimensions(moe: MoeDimensions) -> Dimensions:
    return Dimensions(hidden_size=64, vocab_size=96, layers=1, eps=1e-6, max_context=128, moe=moe)


def _block(moe: MoeDimensions, tokens: int) -> tvm.IRModule:
    module = import_onnx(BLOCKS["moe"].build(_dimensions(moe)), tokens, "float32")
    for phase in (simplify_gather(), fuse_rms_norm()):
        module = phase(module)
    return module


@pytest.mark.parametrize("tokens", [1, 8])
@pytest.mark.parametrize(
    "moe",
    [SMALL, replace(SMALL, experts=256, top_k=8), replace(SMALL, experts=2, top_k=1)],
    ids=["small", "many", "one_of_two"],
)
def test_a_mixture_becomes_a_router_and_one_expert_call(moe: MoeDimensions, tokens: int) -> None:
    module = moa_fusion()(_block(moe, tokens))
    weights = "router, experts_gate_up, experts_down"
    assert report(module)[-1] == f"moa_fusion: 1 x mixture of experts ({weights})"
    assert calls(module).count("emberd.moe") == calls(module).count("emberd.router") == 1
    assert not {"relax.take", "relax.topk"} & set(calls(module))


def test_the_fused_block_computes_what_onnxruntime_computes() -> None:
    model = BLOCKS["moe"].build(_dimensions(SMALL))
    session = onnxruntime.InferenceSession(model.SerializeToString())
    fused = moa_fusion()(_block(SMALL, 4))
    shapes = [[int(size) for size in p.ty.shape] for p in fused["main"].params]
    arguments = [random(*shape, seed=i) / 4 for i, shape in enumerate(shapes)]
    names = [parameter.name for parameter in fused["main"].params]
    expected = session.run(None, dict(zip(names, arguments, strict=True)))[0]
    assert np.abs(run(fused, *arguments) - expected).max() < 1e-4 * expected.std()


def _mixture(**changes: Any) -> tvm.IRModule:
    """sum_k w[:, k] * down[ids[:, k]] (silu(gate) * up), with some attributes changed."""

    def body(emit: Any, x: Any, router: Any, gate_up: Any, down: Any) -> Any:
        scores = op.nn.softmax(op.matmul(x, op.permute_dims(router, [1, 0])), axis=-1)
        chosen = emit(op.topk(scores, TOP_K, dtype="int64"))
        values, ids = (emit(relax.TupleGetItem(chosen, i)) for i in range(2))
        weights = op.divide(values, op.sum(values, -1, keepdims=True))
        row = op.expand_dims(x, [1, 2])
        gathered = op.take(gate_up, ids, axis=0)
        projected = op.matmul(row, op.permute_dims(gathered, changes.get("axes", [0, 1, 3, 2])))
        halves = emit(op.split(projected, changes.get("split", [HIDDEN]), axis=-1))
        gate, up = (emit(relax.TupleGetItem(halves, i)) for i in range(2))
        activate = changes.get("activate", op.sigmoid)
        hidden = op.multiply(op.multiply(gate, activate(gate)), up)
        matrices = op.permute_dims(op.take(down, ids, axis=0), [0, 1, 3, 2])
        rows = op.squeeze(op.matmul(hidden, matrices), [2])
        weighted = op.multiply(rows, op.expand_dims(weights, [2]))
        output = emit(op.sum(weighted, 1, keepdims=changes.get("keepdims", False)))
        return (output, gathered) if changes.get("gathered_is_read") else output

    # Expert matrices are square, so that shapes fit even where they are not transposed.
    parameters = {
        "x": (TOKENS, 2 * HIDDEN),
        "router": (EXPERTS, 2 * HIDDEN),
        "gate_up": (EXPERTS, 2 * HIDDEN, 2 * HIDDEN),
        "down": (EXPERTS, 2 * HIDDEN, changes.get("width", HIDDEN)),
    }
    return function(parameters, body)


def test_what_others_read_of_a_mixture_stays() -> None:
    module = moa_fusion()(_mixture(gathered_is_read=True))
    assert calls(module).count("emberd.moe") == calls(module).count("relax.take") == 1


@pytest.mark.parametrize(
    "change",
    [
        {"axes": [0, 1, 2, 3]},
        {"split": [1], "width": 2 * HIDDEN - 1},
        {"activate": op.tanh},
        {"keepdims": True},
    ],
    ids=lambda change: next(iter(change)),
)
def test_other_expressions_are_left_alone(change: dict[str, Any]) -> None:
    assert "emberd.moe" in calls(moa_fusion()(_mixture()))
    before = _mixture(**change)
    after = moa_fusion()(before)
    assert report(after) == []
    assert calls(after) == calls(before)


def test_other_blocks_are_left_alone() -> None:
    module = import_onnx(BLOCKS["head"].build(_dimensions(SMALL)), 1, "float32")
    assert report(moa_fusion()(module)) == []
