"""emberd and llama.cpp on the same model, measured in turns on a quiet machine.

Makes the model in build/bench first (checkpoint, artifact, the peer's file; about two minutes and
8 GB), and writes build/bench.json and, as a table, build/bench.md.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from emberd.compile.build import build
from emberd.compile.convert import convert
from emberd.compile.converted import ConvertedModel
from emberd.daemon.artifact import Artifact

from bench import checkpoint, peer_file
from bench.figures import FULL, QUICK, measure
from bench.measure import Bench, note
from bench.table import markdown, write_json
from bench.worker import WorkerError

BUILD = Path(__file__).parents[2] / "build"
RECIPE = "q4a8"  # the peer multiplies with int8 activations too


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the main figures, in 3 minutes")
    parser.add_argument(
        "--artifact", type=Path, help="this artifact of the checkpoint instead of a new one"
    )
    arguments = parser.parse_args()
    paths = _prepare(BUILD / "bench", arguments.artifact)
    bench, rows = Bench(paths), []
    try:
        for row in measure(
            bench, QUICK if arguments.quick else FULL, Artifact.open(paths["emberd"])
        ):
            rows.append(row)
            write_json(rows, BUILD / "bench.json")
    except WorkerError as error:
        note(f"bench: error: {error}")
        return 2
    table = markdown(rows)
    (BUILD / "bench.md").write_text(table + "\n", encoding="utf-8")
    print(table)
    note(f"others used at most {bench.foreign:.2f} cores during a sample")
    return 0


def _prepare(folder: Path, artifact: Path | None) -> dict[str, Path]:
    """The file or folder of each side; checkpoint and peer's file are kept from run to run."""
    source, converted, peer = folder / "checkpoint", folder / "converted", folder / "peer.gguf"
    if not (source / "model.safetensors").exists():
        _make("checkpoint", source, checkpoint.write)
        peer.unlink(missing_ok=True)
    _make("converted model", converted, lambda path: convert(source, path))
    if not peer.exists():
        model = ConvertedModel.load(converted)
        _make("peer's file", peer, lambda path: peer_file.write(model, RECIPE, path))
    if artifact is None:
        artifact = folder / "artifact"
        _make("artifact", artifact, lambda path: build(converted, path, "host", RECIPE))
    return {"emberd": artifact, "peer": peer}


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


if __name__ == "__main__":
    sys.exit(main())
