"""The command `emberd`: whatever is wrong is one line on stderr and exit status 2."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from emberd.daemon.artifact import Artifact
from emberd.daemon.cli import main
from emberd.daemon.server import run


@pytest.fixture
def artifact(demo_artifact: Path, tmp_path: Path) -> Path:
    """A copy of the demo's artifact, to be damaged."""
    return Path(shutil.copytree(demo_artifact, tmp_path / "artifact"))


def _refused(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    assert main([str(argument) for argument in arguments]) == 2
    output, errors = capsys.readouterr()
    assert output == "" and errors.startswith("emberd: error: ")
    assert len(errors.splitlines()) == 1
    return errors


def _alter(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


SMALL = ("program.msgpack", "vocabulary.msgpack", "chat_template.jinja", "generation_config.json")
LARGE = ("weights.bin", "experts.bin")


@pytest.mark.parametrize("name", [*SMALL, *LARGE, "manifest.json"])
@pytest.mark.parametrize("damage", [Path.unlink, _truncate])
def test_files_that_are_missing_or_cut(
    artifact: Path, capsys: pytest.CaptureFixture[str], name: str, damage: Callable[[Path], None]
) -> None:
    damage(artifact / name)
    assert name in _refused(capsys, "serve", artifact)


@pytest.mark.parametrize("name", SMALL)
def test_files_of_which_one_bit_differs(
    artifact: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    _alter(artifact / name, -7)
    assert f"{name} is damaged" in _refused(capsys, "serve", artifact)
    assert f"{name} is damaged" in _refused(capsys, "check", artifact)


@pytest.mark.parametrize("name", LARGE)
def test_check_reads_the_weights_too(
    artifact: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert main(["check", str(artifact)]) == 0
    assert "every file is as built" in capsys.readouterr().out
    _alter(artifact / name, 100_000)
    assert name in _refused(capsys, "check", artifact)


def test_kernels_of_which_one_bit_differs(
    artifact: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (kernels,) = artifact.glob("kernels-*.so")
    _alter(kernels, 5000)
    assert f"{kernels.name} is damaged" in _refused(capsys, "serve", artifact)


def test_no_artifact_at_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "nothing does not exist" in _refused(capsys, "serve", tmp_path / "nothing")
    (tmp_path / "file").write_text("")
    assert "is not an artifact" in _refused(capsys, "serve", tmp_path / "file")
    assert "is not an artifact" in _refused(capsys, "serve", tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.yaml"])
def test_a_model_that_is_not_compiled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (tmp_path / name).write_text("{}")
    assert "run emberc build first" in _refused(capsys, "serve", tmp_path)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("prot: 8080", "unknown setting 'prot'"),
        ("port: eighty", "port: expected int"),
        ("slots: 0", "slots: expected 1 to 256"),
        ("drain_seconds: .nan", "drain_seconds"),
        ("- port", "expected settings"),
        ("{", "not YAML"),
        ("1: 2", "unknown setting 1"),
    ],
)
def test_a_configuration_that_cannot_be(
    demo_artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, reason: str
) -> None:
    path = tmp_path / "emberd.yaml"
    path.write_text(text)
    errors = _refused(capsys, "serve", demo_artifact, "--config", path)
    assert reason in errors and str(path) in errors


def test_no_configuration(
    demo_artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "none.yaml"
    assert str(missing) in _refused(capsys, "serve", demo_artifact, "--config", missing)


def test_no_host_is_not_every_interface(
    demo_artifact: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "host: empty; write 0.0.0.0" in _refused(capsys, "serve", demo_artifact, "--host", "")


def test_a_port_that_is_taken(demo_artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        errors = _refused(capsys, "serve", demo_artifact, "--port", port)
    assert f"cannot listen on 127.0.0.1:{port}: " in errors and "in use" in errors


@pytest.mark.parametrize("host", ["203.0.113.1", "no such host", "h" * 300])
def test_an_address_that_is_not_ours(
    demo_artifact: Path, capsys: pytest.CaptureFixture[str], host: str
) -> None:
    errors = _refused(capsys, "serve", demo_artifact, "--host", host, "--port", "0")
    assert f"cannot listen on {host[:80]}:" in errors and "Unknown error" not in errors


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Interrupts count, as in a terminal: of what a shell runs in the background they do not."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_while_loading(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    unused_tcp_port: int,
) -> None:
    listens, listen = threading.Event(), run._listen

    async def listen_and_tell(*arguments: Any) -> Any:
        site = await listen(*arguments)
        listens.set()
        return site

    def interrupted(path: Path) -> None:
        assert listens.wait(60)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(run, "_listen", listen_and_tell)
    monkeypatch.setattr(Artifact, "open", interrupted)
    assert main(["serve", str(tmp_path), "--port", str(unused_tcp_port)]) == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("url", ["127.0.0.1:8080", "localhost", "ftp://x"])
def test_a_url_without_its_scheme(capsys: pytest.CaptureFixture[str], url: str) -> None:
    assert "has to start with http:// or https://" in _refused(capsys, "chat", "--url", url)


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("serve", "Answer OpenAI's API"),
        ("check", "what emberc build wrote"),
        ("chat", "Talk to"),
        ("chat", "(default http://127.0.0.1:8080)"),
    ],
)
def test_commands_say_what_they_do(
    capsys: pytest.CaptureFixture[str], command: str, text: str
) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    assert text in " ".join(capsys.readouterr().out.split())


def test_without_a_command_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    output, errors = capsys.readouterr()
    assert output == ""
    for line in ("serve answer OpenAI's", "check verify every hash", "chat talk to a running"):
        assert line in " ".join(errors.split())


def test_the_command_is_installed_as_a_module() -> None:
    command = [sys.executable, "-m", "emberd.daemon.cli", "--help"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "serve" in result.stdout and "chat" in result.stdout
