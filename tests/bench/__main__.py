"""emberd and llama.cpp on the same model, measured in turns on a quiet machine.

Makes the model in build/bench first (checkpoint, artifact, the peer's file; about two minutes and
8 GB), and writes build/bench.json and, as a table, build/bench.md.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from emberd.daemon.artifact import Artifact

from bench import checkpoint
from bench.figures import FULL, QUICK, measure
from bench.measure import Bench, note
from bench.prepare import BUILD, prepare
from bench.table import markdown, write_json
from bench.worker import WorkerError


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the main figures, in 3 minutes")
    parser.add_argument(
        "--artifact", type=Path, help="this artifact of the checkpoint instead of a new one"
    )
    arguments = parser.parse_args()
    paths = prepare(BUILD / "bench", checkpoint.write_fifth, arguments.artifact)
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


if __name__ == "__main__":
    sys.exit(main())
