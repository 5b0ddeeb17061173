"""Both commands tell the version of the package."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import metadata

import pytest
from emberd.compile import cli as emberc
from emberd.daemon import cli as emberd

Main = Callable[[Sequence[str]], int]


@pytest.mark.parametrize(("name", "main"), [("emberc", emberc.main), ("emberd", emberd.main)])
def test_the_version_is_the_package_s(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, main: Main
) -> None:
    monkeypatch.setattr(metadata, "version", {"emberd": "1.2.3"}.__getitem__)
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"{name} 1.2.3\n"


@pytest.mark.parametrize(("name", "main"), [("emberc", emberc.main), ("emberd", emberd.main)])
def test_a_source_tree_has_no_version(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, main: Main
) -> None:
    def missing(package: str) -> str:
        raise metadata.PackageNotFoundError(package)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(SystemExit, match="2"):
        main(["--version"])
    assert f"{name}: error: emberd runs from a source tree" in capsys.readouterr().err
