"""The systemd units start the daemon as its command line allows, and let it drain."""

from __future__ import annotations

import configparser
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from emberd.daemon import cli
from emberd.daemon.config import Config

UNITS = Path(__file__).parents[2] / "systemd"


def _section(name: str, section: str) -> configparser.SectionProxy:
    unit = configparser.RawConfigParser()
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(UNITS / name)
    return unit[section]


@pytest.fixture
def service() -> configparser.SectionProxy:
    return _section("emberd.service", "Service")


def test_the_socket_is_where_the_daemon_would_listen() -> None:
    default = Config()
    assert _section("emberd.socket", "Socket")["ListenStream"] == f"{default.host}:{default.port}"


def test_the_command_is_taken(service: configparser.SectionProxy) -> None:
    program, *arguments = shlex.split(service["ExecStart"])
    assert Path(program).name == "emberd"
    assert cli._parser().parse_args(arguments).command == "serve"


def test_requests_may_end_before_systemd_kills(service: configparser.SectionProxy) -> None:
    assert int(service["TimeoutStopSec"]) > Config().drain_seconds


@pytest.mark.parametrize("name", ["emberd.service", "emberd.socket"])
def test_systemd_finds_no_fault(tmp_path: Path, name: str) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("needs systemd-analyze, which is not installed")
    for unit in UNITS.iterdir():
        text = unit.read_text().replace("/usr/local/bin/emberd", "/bin/true")
        (tmp_path / unit.name).write_text(text)
    result = subprocess.run(
        [analyze, "verify", tmp_path / name], capture_output=True, text=True, check=False
    )
    assert "emberd" not in result.stderr, result.stderr
