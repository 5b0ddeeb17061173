"""Artifacts that were built without an optional pass compute what the others compute."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import numpy as np
import pytest
from checkpoints import TinyModel, write_checkpoint
from emberd.compile.build import build
from emberd.compile.cli import main
from emberd.compile.convert import convert
from emberd.compile.converted import ConvertedModel
from emberd.compile.isa.isa import host_isas
from emberd.compile.passes.lower_kernels import ACQUIRE_EXPERTS
from emberd.compile.pipeline import OPTIONAL_PASSES, compile_blocks
from emberd.compile.quantize.recipes import RECIPES
from emberd.compile.run import core_logits
from emberd.compile.verify import compare

TOKENS = np.random.default_rng(0).integers(0, 96, 29).tolist()

FEW = TinyModel("few_experts", layers="D", hidden=64, intermediate=32, shared=32)
MANY = TinyModel("many_experts", layers="A", hidden=64, experts=32, top_k=5, intermediate=96)
ODD = TinyModel("odd_experts", layers="A", hidden=48, experts=3, top_k=2, intermediate=7, shared=9)
QUANTISED = [  # recipe, model, bound on the largest KL
    # int8 activations: every token passes every expert here, so that no rounding can change which
    # ones it chooses.
    ("q4a8", TinyModel("all_of_two", layers="A", hidden=64, experts=2, top_k=2), 1e-3),
    # int16 activations: finer than what separates one choice from another in this prompt.
    ("q8", TinyModel("two_of_eight", layers="D", hidden=64, intermediate=32), 1e-7),
    ("q4", TinyModel("all_of_eight", layers="D", hidden=64, top_k=8, intermediate=32), 1e-7),
]


def _converted(model: TinyModel, folder: Path) -> Path:
    write_checkpoint(folder / "checkpoint", model)
    convert(folder / "checkpoint", folder / "converted", name=model.name)
    return folder / "converted"


def _logits(
    converted: Path, recipe: str, chunks: tuple[int, ...], disabled: Collection[str] = ()
) -> np.ndarray:
    artifact = converted.parent / f"artifact-{len(disabled)}"
    build(converted, artifact, "host", recipe, chunk_sizes=chunks, disabled=disabled)
    return core_logits(artifact, TOKENS, threads=2)


@pytest.mark.parametrize(
    ("model", "disabled"),
    [(FEW, OPTIONAL_PASSES), (MANY, ("moa_fusion",)), (ODD, ("moa_fusion",))],
    ids=["few_without_any", "many", "odd"],
)
def test_f32_logits_are_those_of_the_fused_artifact(
    model: TinyModel, disabled: Collection[str], tmp_path: Path
) -> None:
    converted = _converted(model, tmp_path)
    fused = _logits(converted, "f32", (1, 8))
    unfused = _logits(converted, "f32", (1, 8), disabled)
    assert np.abs(unfused - fused).max() <= 1e-3 * fused.std()


@pytest.mark.parametrize(
    ("recipe", "model", "bound"), QUANTISED, ids=[recipe for recipe, _model, _bound in QUANTISED]
)
def test_quantised_logits_differ_by_the_rounding_of_activations(
    recipe: str, model: TinyModel, bound: float, tmp_path: Path
) -> None:
    """The fused kernel rounds what experts read, the gathered experts multiply float32.

    That is the only difference: the weights are the same numbers.
    """
    converted = _converted(model, tmp_path)
    fused = _logits(converted, recipe, (1,))
    comparison = compare(_logits(converted, recipe, (1,), ["moa_fusion"]), fused)
    assert comparison.max_difference > 0
    assert comparison.max_kl <= bound


@pytest.mark.parametrize("recipe", ["f32", "q4a8"])
def test_a_shared_expert_beside_the_routed_ones_puts_out_the_same_bits(
    recipe: str, tmp_path: Path
) -> None:
    converted = _converted(FEW, tmp_path)
    fused = _logits(converted, recipe, (1, 8))
    apart = _logits(converted, recipe, (1, 8), ["fuse_shared_expert"])
    np.testing.assert_array_equal(fused, apart)


def test_chunks_that_would_gather_too_much_are_cut_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    converted = ConvertedModel.load(_converted(FEW, tmp_path))
    token_bytes = FEW.top_k * 3 * FEW.intermediate * FEW.hidden * 4
    monkeypatch.setattr("emberd.compile.pipeline._GATHERED_BYTES", 8 * token_bytes)
    isa = host_isas()[0]
    compiled = compile_blocks(
        converted, RECIPES["q4"], isa, [1, 8, 32], disabled=["moa_fusion"], dump=tmp_path / "ir"
    )
    assert compiled.chunks == [1, 8]
    assert {tokens for _block, tokens in compiled.programs} == {1, 8}
    symbols = [symbol for symbol, _arguments in compiled.programs["moe", 8].calls]
    acquire = next(i for i, symbol in enumerate(symbols) if ACQUIRE_EXPERTS in symbol)
    gathers = [i for i, symbol in enumerate(symbols) if symbol.startswith("gather_experts")]
    assert len(gathers) == 2 and acquire < min(gathers)
    assert compiled.report[0] == "moa_fusion: disabled"
    assert compiled.report[1].startswith("at most 8 tokens in a step")
    assert (tmp_path / "ir" / "report.txt").read_text().splitlines() == compiled.report
    assert "moe x 1: fuse_expert_gather: 2 x gather of experts (experts_gate_up; experts_down)" in (
        compiled.report
    )


@pytest.mark.parametrize("name", ["quantise", "fuse_everything"])
def test_only_optional_passes_can_be_left_out(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(["build", str(tmp_path), "-o", str(tmp_path / "artifact"), "--disable", name])
    assert status == 2
    error = capsys.readouterr().err
    assert error.startswith(f"emberc: error: pass '{name}' cannot be disabled")
    assert all(allowed in error for allowed in OPTIONAL_PASSES)
