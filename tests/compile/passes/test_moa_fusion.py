"""moa_fusion takes every mixture of experts of its pattern, of any size, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import tvm
from emberd.compile.blocks import BLOCKS
from emberd.compile.dimensions import Dimensions, MoeDimensions
from emberd.compile.passes.fuse_rms_norm import fuse_rms_norm
from emberd.compile.passes.fuse_router import fuse_router
from emberd.compile.passes.import_onnx import import_onnx
from emberd.compile.passes.moa_fusion import moa_fusion
from emberd.compile.passes.rewrite import report
from emberd.compile.passes.simplify_gather import simplify_gather

SMALL = MoeDimensions(experts=8, top_k=2, intermediate_size=32, shared_intermediate_size=64)


def _block(moe: MoeDimensions, tokens: int) -> tvm.IRModule:
    dimensions = Dimensions(
        hidden_size=64, vocab_size=96, layers=1, eps=1e-6, max_context=128, moe=moe
    )
    module = import_onnx(BLOCKS["moe"].build(dimensions), tokens, "float32")
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
    text = module.script(show_meta=False)
    weights = "router, experts_gate_up, experts_down"
    assert report(module)[-1] == f"moa_fusion: 1 x mixture of experts ({weights})"
    assert text.count('"emberd.moe"') == text.count('"emberd.router"') == 1
    assert "R.take" not in text and "R.topk" not in text


def test_without_it_the_router_still_loses_its_top_k_and_experts_are_gathered() -> None:
    text = fuse_router()(_block(SMALL, 1)).script(show_meta=False)
    assert text.count('"emberd.router"') == 1
    assert "R.topk" not in text
    assert text.count("R.take(experts") == 2


def test_other_blocks_are_left_alone() -> None:
    dimensions = Dimensions(
        hidden_size=64, vocab_size=96, layers=1, eps=1e-6, max_context=128, moe=SMALL
    )
    module = import_onnx(BLOCKS["head"].build(dimensions), 1, "float32")
    assert report(moa_fusion()(module)) == []
