"""The committed activation map: of the committed model, from the committed commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from emberd.compile.profile import profile
from emberd.daemon.activation_map import MAP_FILE, ActivationMap
from emberd.daemon.artifact import Artifact
from make_map import covered

DEMO = Path(__file__).parents[2] / "firmware_assets" / "demo"
# Another CPU rounds differently in the last bits, which turns a router here and there.
MOVED = 0.005


@pytest.fixture(scope="module")
def committed() -> ActivationMap:
    return ActivationMap.read(DEMO / MAP_FILE)


def test_it_is_of_the_committed_model(committed: ActivationMap, demo_artifact: Path) -> None:
    """If not: python firmware_assets/demo/make_map.py."""
    committed.check_model(Artifact.open(demo_artifact).model.identity)


def test_the_commands_make_it_again(
    committed: ActivationMap, demo_artifact: Path, tmp_path: Path
) -> None:
    profile(Artifact.open(demo_artifact), DEMO / "commands.jsonl", tmp_path / "map")
    made = ActivationMap.read(tmp_path / "map")
    for ours, theirs in zip(made.classes, committed.classes, strict=True):
        assert (ours.name, ours.commands, ours.tokens) == (
            theirs.name,
            theirs.commands,
            theirs.tokens,
        )
        moved = sum(abs(a - b) for a, b in zip(ours.choices, theirs.choices, strict=True)) / 2
        assert moved <= MOVED * sum(theirs.choices)


def test_a_quarter_of_the_experts_covers_most_of_what_held_out_commands_choose(
    committed: ActivationMap, demo_artifact: Path, tmp_path: Path
) -> None:
    """As the demo's README has it, on every tenth held-out command."""
    lines = (DEMO / "heldout.jsonl").read_text(encoding="utf-8").splitlines()[::10]
    (tmp_path / "commands.jsonl").write_text("\n".join(lines), encoding="utf-8")
    profile(Artifact.open(demo_artifact), tmp_path / "commands.jsonl", tmp_path / "map")
    counted = ActivationMap.read(tmp_path / "map")
    names = {json.loads(line)["class"] for line in lines}
    assert names == {entry.name for entry in committed.classes}
    for name in names:
        assert covered(committed, counted, name) > 0.55
