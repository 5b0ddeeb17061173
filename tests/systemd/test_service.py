"""The systemd unit starts the daemon as its command line allows, and lets it drain."""

from __future__ import annotations

import configparser
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from emberd.daemon import cli
from emberd.daemon.config import Config

UNIT = Path(__file__).parents[2] / "systemd" / "emberd.service"


@pytest.fixture
def service() -> configparser.SectionProxy:
    unit = configparser.RawConfigParser()
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(UNIT)
    return unit["Service"]


def test_the_command_is_taken(service: configparser.SectionProxy) -> None:
    program, *arguments = shlex.split(service["ExecStart"])
    assert Path(program).name == "emberd"
    assert cli._parser().parse_args(arguments).command == "serve"


def test_requests_may_end_before_systemd_kills(service: configparser.SectionProxy) -> None:
    assert int(service["TimeoutStopSec"]) > Config().drain_seconds


def test_systemd_finds_no_fault(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("needs systemd-analyze, which is not installed")
    text = UNIT.read_text().replace("/usr/local/bin/emberd", "/bin/true")
    (tmp_path / UNIT.name).write_text(text)
    result = subprocess.run(
        [analyze, "verify", tmp_path / UNIT.name], capture_output=True, text=True, check=False
    )
    assert UNIT.name not in result.stderr, result.stderr
