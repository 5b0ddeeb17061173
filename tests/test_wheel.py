"""What a device has to store: the wheel, and an artifact's kernels, without their model."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIMIT = 12_000_000  # bytes


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sources alone, in a folder of their own."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md"):
        shutil.copy(ROOT / name, source)
    built = shutil.ignore_patterns("*.so", "__pycache__")
    for name in ("compile", "daemon", "targets"):
        shutil.copytree(ROOT / name, source / name, ignore=built)
    command = [sys.executable, "setup.py", "-q", "bdist_wheel", "--dist-dir", str(folder)]
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=240)
    (found,) = folder.glob("*.whl")
    return found


def test_the_wheel_and_the_kernels_are_small(wheel: Path, demo_artifact: Path) -> None:
    (kernels,) = demo_artifact.glob("kernels-*.so")
    with zipfile.ZipFile(wheel) as archive:
        unpacked = sum(entry.file_size for entry in archive.infolist())
    assert wheel.stat().st_size + kernels.stat().st_size < LIMIT
    assert unpacked + kernels.stat().st_size < LIMIT


def test_the_wheel_holds_the_programs_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {"emberd"}
    for needed in ("daemon/cli.py", "compile/cli.py", "targets/registry.py"):
        assert f"emberd/{needed}" in names
    (core,) = (name for name in names if name.startswith("emberd/daemon/native/_core"))
    assert core.endswith(".so")
