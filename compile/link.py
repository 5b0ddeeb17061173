"""Kernels become object files, several at a time, and those a shared library for the device."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import tvm
from emberd.compile.isa.isa import Isa
from emberd.compile.parallel import in_order
from emberd.compile.passes.lower_kernels import KernelLibrary
from emberd.daemon.errors import EmberdError

# Equal symbols are equal kernels, so a process that builds several models compiles each one once.
_OBJECTS: dict[tuple[str, str], bytes] = {}


def build_library(
    library: KernelLibrary, isa: Isa, progress: Callable[[str], None] = lambda _label: None
) -> bytes:
    """The kernels compiled for `isa` as a shared library, byte for byte reproducible.

    Raises EmberdError when the system's linker fails.
    """

    def compiled(symbol: str) -> bytes:
        progress(f"{symbol} for {isa.name}")
        key = isa.name, symbol
        if key not in _OBJECTS:
            _OBJECTS[key] = _compile(library.builders[symbol](isa), isa)
        return _OBJECTS[key]

    with tempfile.TemporaryDirectory() as folder:
        names = []
        for number, data in enumerate(in_order(compiled, sorted(library.builders))):
            names.append(f"{number}.o")
            (Path(folder) / names[-1]).write_bytes(data)
        _link(names, Path(folder))
        return (Path(folder) / "kernels.so").read_bytes()


def _compile(function: tvm.tirx.PrimFunc, isa: Isa) -> bytes:
    """An object file; TVM and LLVM let other threads run meanwhile."""
    module = tvm.IRModule({str(function.attrs["global_symbol"]): function})
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.o"
        tvm.tirx.build(module, target=tvm.target.Target(isa.target)).write_to_file(str(file))
        return file.read_bytes()


def _link(names: list[str], folder: Path) -> None:
    options = ["-shared", "-nostdlib", "-Wl,--build-id=none", "-Wl,--strip-debug"]
    command = ["cc", *options, "-o", "kernels.so", *names]
    try:
        subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    except FileNotFoundError:
        raise EmberdError("no C compiler: install gcc or clang, emberc links with it") from None
    except subprocess.CalledProcessError as error:
        reason = "; ".join(error.stderr.split("\n")).strip("; ")
        raise EmberdError(f"linking the kernels failed: {reason}") from error
