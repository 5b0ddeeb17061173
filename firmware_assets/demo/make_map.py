"""Make ``expert_activation_map.bin`` from ``commands.jsonl``, and say how much it covers.

``python firmware_assets/demo/make_map.py``
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from emberd.compile.build import build
from emberd.compile.profile import profile
from emberd.daemon.activation_map import MAP_FILE, ActivationMap
from emberd.daemon.artifact import Artifact

HERE = Path(__file__).parent
RECIPE = "q4"


def covered(ranked: ActivationMap, counted: ActivationMap, name: str) -> float:
    """Share of a class's choices in ``counted``, over all layers, that fall on the quarter of each
    layer's experts that ``ranked`` has first for the class."""
    first, second = ranked.index(name), counted.index(name)
    shares = []
    for layer in range(ranked.layers):
        hot = ranked.ranking(layer, first)[: ranked.experts // 4]
        mass = counted.mass(layer, second)
        shares.append(sum(mass[expert] for expert in hot))
    return sum(shares) / len(shares)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "artifact"
        build(HERE / "model", path, "host", RECIPE, name="demo")
        artifact = Artifact.open(path)
        print(profile(artifact, HERE / "commands.jsonl", HERE / MAP_FILE))
        profile(artifact, HERE / "heldout.jsonl", Path(folder) / "heldout.map")
        made = ActivationMap.read(HERE / MAP_FILE)
        heldout = ActivationMap.read(Path(folder) / "heldout.map")
    print("\n| class | its commands | held-out commands |\n|---|---|---|")
    for entry in made.classes:
        shares = covered(made, made, entry.name), covered(made, heldout, entry.name)
        print(f"| {entry.name} | " + " | ".join(f"{100 * share:.1f} %" for share in shares) + " |")


if __name__ == "__main__":
    main()
