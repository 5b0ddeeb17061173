"""The numbered phases that turn a converted model into programs and kernel libraries."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

import tvm
from emberd.compile.block_program import BlockProgram, extract
from emberd.compile.converted import ConvertedModel
from emberd.compile.isa.isa import Isa
from emberd.compile.passes.bound_logits import bound_logits
from emberd.compile.passes.fuse_expert_gather import fuse_expert_gather
from emberd.compile.passes.fuse_gated_activation import fuse_gated_activation
from emberd.compile.passes.fuse_gated_sum import fuse_gated_sum
from emberd.compile.passes.fuse_linear import fuse_embedding, fuse_linear
from emberd.compile.passes.fuse_normed_projections import fuse_normed_projections
from emberd.compile.passes.fuse_projections import fuse_projections
from emberd.compile.passes.fuse_rms_norm import fuse_rms_norm
from emberd.compile.passes.fuse_router import fuse_router
from emberd.compile.passes.fuse_shared_expert import fuse_shared_expert
from emberd.compile.passes.import_onnx import import_onnx
from emberd.compile.passes.lower_kernels import ACQUIRE_EXPERTS, KernelLibrary, lower_kernels
from emberd.compile.passes.moa_fusion import moa_fusion
from emberd.compile.passes.plan_memory import lower_remaining, plan_memory
from emberd.compile.passes.quantise import quantise
from emberd.compile.passes.rewrite import report
from emberd.compile.passes.simplify_gather import simplify_gather
from emberd.compile.quantize.recipes import Recipe
from emberd.daemon.errors import EmberdError
from tvm import tirx

# Without these a model still compiles, to slower kernels; every other pass is needed.
OPTIONAL_PASSES = (
    "fuse_gated_activation",
    "fuse_gated_sum",
    "fuse_normed_projections",
    "fuse_projections",
    "fuse_rms_norm",
    "fuse_shared_expert",
    "moa_fusion",
)
_GATHERED_BYTES = 1 << 30  # of dequantised experts that a chunk may gather without moa_fusion


@dataclass(frozen=True)
class CompiledBlocks:
    """Block programs by (block kind, tokens), the kernels they call, and what passes reported.

    `chunks`: the numbers of tokens that there are programs for, ascending.
    """

    programs: dict[tuple[str, int], BlockProgram]
    kernels: KernelLibrary
    chunks: list[int]
    report: list[str]


def compile_blocks(
    model: ConvertedModel,
    recipe: Recipe,
    isa: Isa,
    chunks: list[int],
    *,
    disabled: Collection[str] = (),
    dump: Path | None = None,
    progress: Callable[[str], None] = lambda _label: None,
) -> CompiledBlocks:
    """Compile every block kind of `model` for every number of tokens in `chunks`.

    `isa` gives the dumped IR its kernel bodies; programs are the same for all. `disabled` names
    optional passes to leave out; without moa_fusion, chunks are cut short as well. With
    `dump`, the IR after each phase is written there as BLOCK-tTOKENS/NN-phase.py, and the report
    as report.txt.
    """
    library = KernelLibrary()
    programs: dict[tuple[str, int], BlockProgram] = {}
    reports: dict[tuple[str, int], list[str]] = {}
    kept = chunks if "moa_fusion" not in disabled else _gathering_chunks(model, chunks)
    for block in dict.fromkeys(instance.block for instance in model.stack):
        onnx_model = model.block_model(block)
        for tokens in kept:
            progress(f"{block} x {tokens}")
            module = import_onnx(onnx_model, tokens, recipe.cache_dtype)
            folder = None if dump is None else dump / f"{block}-t{tokens}"
            programs[block, tokens], reports[block, tokens] = compile_module(
                module, block, tokens, recipe, isa, library, disabled=disabled, dump=folder
            )
    lines = [f"{name}: disabled" for name in sorted(set(disabled))]
    if kept != chunks:
        lines.append(
            f"at most {kept[-1]} tokens in a step, as without moa_fusion each gathers its experts "
            "in float32"
        )
    lines += _summary(model, reports)
    if dump is not None:
        (dump / "report.txt").write_text("".join(f"{line}\n" for line in lines))
    return CompiledBlocks(programs, library, kept, lines)


def compile_module(
    module: tvm.IRModule,
    block: str,
    tokens: int,
    recipe: Recipe,
    isa: Isa,
    library: KernelLibrary,
    *,
    disabled: Collection[str] = (),
    dump: Path | None = None,
) -> tuple[BlockProgram, list[str]]:
    """All phases after the import of a block for so many tokens; its kernels go to `library`.

    Returns its program and what passes reported. With `dump`, the IR after each phase is written
    there as NN-phase.py.
    """
    _dump(dump, 1, "import_onnx", module)
    with tvm.target.Target(isa.target):
        for number, phase in enumerate(_phases(recipe, block, isa, library), start=2):
            if phase.info.name not in disabled:
                module = phase(module)
                _dump(dump, number, str(phase.info.name), module)
    return extract(module, tokens, _share_remaining(module, library)), report(module)


def check_optional(disabled: Collection[str]) -> None:
    """Raises EmberdError for the name of a pass that does not exist or cannot be left out."""
    for name in disabled:
        if name not in OPTIONAL_PASSES:
            raise EmberdError(
                f"pass {name!r} cannot be disabled; those that can: {', '.join(OPTIONAL_PASSES)}"
            )


def _phases(
    recipe: Recipe, block: str, isa: Isa, library: KernelLibrary
) -> list[tvm.transform.Pass]:
    """The passes in order, from the second phase on."""
    return [
        simplify_gather(),
        fuse_rms_norm(),
        moa_fusion(),
        fuse_router(),
        fuse_expert_gather(),
        fuse_gated_activation(),
        fuse_gated_sum(),
        fuse_linear(),
        fuse_embedding(),
        quantise(recipe, block),
        *([bound_logits()] if block == "head" else []),
        fuse_shared_expert(),
        fuse_projections(),
        fuse_normed_projections(),
        lower_kernels(isa, library),
        lower_remaining(),
        plan_memory(),
    ]


def _gathering_chunks(model: ConvertedModel, chunks: list[int]) -> list[int]:
    """The chunks, cut to as many tokens as gather at most `_GATHERED_BYTES`, or else to one."""
    moe = model.dimensions.moe
    expert = 3 * moe.intermediate_size * model.dimensions.hidden_size * 4
    largest = max(1, _GATHERED_BYTES // (moe.top_k * expert))
    return sorted({min(size, largest) for size in chunks})


def _summary(model: ConvertedModel, reports: dict[tuple[str, int], list[str]]) -> list[str]:
    """What passes reported, by block; chunk sizes are named where they differ."""
    stack = [instance.block for instance in model.stack]
    lines = []
    for block in dict.fromkeys(stack):
        by_tokens = {tokens: notes for (name, tokens), notes in reports.items() if name == block}
        for note in dict.fromkeys(note for notes in by_tokens.values() for note in notes):
            sizes = [tokens for tokens, notes in by_tokens.items() if note in notes]
            where = "" if len(sizes) == len(by_tokens) else f" (chunk sizes {sizes})"
            lines.append(f"{block} x {stack.count(block)}: {note}{where}")
    return lines


def _share_remaining(module: tvm.IRModule, library: KernelLibrary) -> dict[str, str]:
    """Name the kernels of `lower_remaining` by their content, so that equal ones are one.

    Returns the symbol of each by its name in the module.
    """
    renamed: dict[str, str] = {}
    for variable, function in module.functions.items():
        name = str(variable.name_hint)
        if not isinstance(function, tirx.PrimFunc) or name in library.builders:
            continue
        if ACQUIRE_EXPERTS in name:
            continue
        text = re.sub(rf"\b{re.escape(name)}\b", "kernel", function.script(show_meta=True))
        digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        symbol = f"{name}_{digest}"
        shared = function.with_attr("global_symbol", symbol)
        library.builders.setdefault(symbol, lambda _isa, shared=shared: shared)  # type: ignore[misc]
        renamed[name] = symbol
    return renamed


def _dump(folder: Path | None, number: int, phase: str, module: tvm.IRModule) -> None:
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{number:02}-{phase}.py").write_text(module.script(show_meta=False))
