"""The numbered phases that turn a converted model into programs and kernel libraries."""

from __future__ import annotations

import hashlib
import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import tvm
from emberd.compile.converted import ConvertedModel
from emberd.compile.isa.isa import Isa
from emberd.compile.passes.fuse_gated_activation import fuse_gated_activation
from emberd.compile.passes.fuse_gated_sum import fuse_gated_sum
from emberd.compile.passes.fuse_linear import fuse_embedding, fuse_linear
from emberd.compile.passes.fuse_rms_norm import centre_rms_norm, fuse_rms_norm, gate_rms_norm
from emberd.compile.passes.fuse_router import fuse_router
from emberd.compile.passes.import_onnx import import_onnx
from emberd.compile.passes.lower_kernels import ACQUIRE_EXPERTS, KernelLibrary, lower_kernels
from emberd.compile.passes.moa_fusion import moa_fusion
from emberd.compile.passes.plan_memory import lower_remaining, plan_memory
from emberd.compile.passes.quantise import quantise
from emberd.compile.passes.rewrite import report
from emberd.compile.passes.simplify_gather import simplify_gather
from emberd.compile.program import BlockProgram, extract
from emberd.compile.quantize.recipes import Recipe
from emberd.daemon.errors import EmberdError
from tvm import tirx

CACHE_DTYPES = {"f32": "float32", "q8": "float16", "q4": "float16"}  # KV cache, by recipe


@dataclass(frozen=True)
class CompiledBlocks:
    """Block programs by (block kind, tokens), the kernels they call, and what passes reported."""

    programs: dict[tuple[str, int], BlockProgram]
    kernels: KernelLibrary
    report: list[str]


def compile_blocks(
    model: ConvertedModel,
    recipe: Recipe,
    isa: Isa,
    chunks: list[int],
    *,
    dump: Path | None = None,
    progress: Callable[[str], None] = lambda _label: None,
) -> CompiledBlocks:
    """Compile every block kind of `model` for every number of tokens in `chunks`.

    `isa` gives the dumped IR its kernel bodies; programs are the same for all. With `dump`, the IR
    after each phase is written there as NN-phase.py.
    """
    library = KernelLibrary()
    programs: dict[tuple[str, int], BlockProgram] = {}
    reports: list[str] = []
    for block in dict.fromkeys(instance.block for instance in model.stack):
        onnx_model = model.block_model(block)
        for tokens in chunks:
            progress(f"{block} x {tokens}")
            module = import_onnx(onnx_model, tokens, cache_dtype=CACHE_DTYPES[recipe.name])
            folder = None if dump is None else dump / f"{block}-t{tokens}"
            _dump(folder, 1, "import_onnx", module)
            phases = [
                simplify_gather(),
                fuse_rms_norm(),
                centre_rms_norm(),
                gate_rms_norm(),
                moa_fusion(),
                fuse_router(),
                fuse_gated_activation(),
                fuse_gated_sum(),
                fuse_linear(),
                fuse_embedding(),
                quantise(recipe, block),
                lower_kernels(isa, library),
                lower_remaining(),
                plan_memory(),
            ]
            with tvm.target.Target(isa.target):
                for number, phase in enumerate(phases, start=2):
                    module = phase(module)
                    _dump(folder, number, str(phase.info.name), module)
            symbols = _share_remaining(module, library)
            programs[block, tokens] = extract(module["main"], symbols)
            reports += [f"{block} x {tokens}: {line}" for line in report(module)]
    return CompiledBlocks(programs, library, reports)


def build_library(library: KernelLibrary, isa: Isa) -> bytes:
    """The kernels compiled for `isa` as a shared library, byte for byte reproducible.

    Raises EmberdError when the system's linker fails.
    """
    functions = library.build(isa)
    names = [str(function.attrs["global_symbol"]) for function in functions]
    module = tvm.IRModule(dict(zip(names, functions, strict=True)))
    with tempfile.TemporaryDirectory() as folder:
        objects, output = Path(folder) / "kernels.o", Path(folder) / "kernels.so"
        tvm.tirx.build(module, target=tvm.target.Target(isa.target)).write_to_file(str(objects))
        command = [
            "cc",
            "-shared",
            "-nostdlib",
            "-Wl,--build-id=none",
            "-o",
            str(output),
            str(objects),
        ]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except FileNotFoundError:
            raise EmberdError("no C compiler: install gcc or clang, emberc links with it") from None
        except subprocess.CalledProcessError as error:
            raise EmberdError(f"linking the kernels failed: {error.stderr.strip()}") from error
        return output.read_bytes()


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
