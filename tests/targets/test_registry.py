"""Target files are read strictly, and `host` resolves to this machine's target."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
from emberd.compile.isa.isa import ISAS
from emberd.targets.registry import UnknownTargetError, find_target, load_target, targets


def test_every_target_names_instruction_sets_that_exist() -> None:
    for name, target in targets().items():
        assert target.name == name
        assert set(target.isas) <= set(ISAS)


def test_host_is_the_target_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert find_target("host") == find_target("x86-64")
    monkeypatch.setattr(platform, "machine", lambda: "vax")
    with pytest.raises(UnknownTargetError, match=r"this machine \(vax\)"):
        find_target("host")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "name: a\nmachine: b\nisas: [c]",
        "name: a\nmachine: b\nisas: []\nexpert_policy: lru",
        "name: a\nmachine: b\nisas: [c]\nexpert_policy: 1",
        "name: a\nmachine: b\nisas: [c]\nexpert_policy: nope",
        "name: a\nmachine: b\nisas: [c]\nexpert_policy: belady",
        "name: 1",
    ],
)
def test_a_damaged_target_file_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "target.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"target\.yaml"):
        load_target(path)
