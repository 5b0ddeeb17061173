"""Makes what is measured: a checkpoint, and of it the files of both sides."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from emberd.compile.build import build
from emberd.compile.convert import convert
from emberd.compile.converted import ConvertedModel

from bench.measure import note

BUILD = Path(__file__).parents[2] / "build"
RECIPE = "q4a8"  # the peer multiplies with int8 activations too


def prepare(
    folder: Path, write: Callable[[Path], object], artifact: Path | None = None
) -> dict[str, Path]:
    """The file or folder of each side, made in `folder` from the checkpoint that `write` writes.

    Checkpoint and peer's file are kept from run to run. `artifact`: taken instead of a new one.
    """
    converted, peer = folder / "converted", folder / "peer.gguf"
    if not (folder / "checkpoint" / "model.safetensors").exists():
        peer.unlink(missing_ok=True)
    model = prepare_converted(folder, write)
    if not peer.exists():
        from bench import peer_file  # gguf comes with the extra

        _make("peer's file", peer, lambda path: peer_file.write(model, RECIPE, path))
    if artifact is None:
        artifact = folder / "artifact"
        _make("artifact", artifact, lambda path: build(converted, path, "host", RECIPE))
    return {"emberd": artifact, "peer": peer}


def prepare_converted(folder: Path, write: Callable[[Path], object]) -> ConvertedModel:
    """The checkpoint, unless `folder` has it already, and the converted model."""
    source, converted = folder / "checkpoint", folder / "converted"
    if not (source / "model.safetensors").exists():
        _make("checkpoint", source, write)
    _make("converted model", converted, lambda path: convert(source, path))
    return ConvertedModel.load(converted)


def _make(what: str, path: Path, make: Callable[[Path], object]) -> None:
    """Makes `path` anew, and under its name only when it is complete."""
    note(f"making the {what}")
    partial = path.with_name(f"{path.name}.partial")
    for old in (path, partial):
        if old.is_dir():
            shutil.rmtree(old)
        old.unlink(missing_ok=True)
    partial.parent.mkdir(parents=True, exist_ok=True)
    make(partial)
    partial.rename(path)
