"""The command line: one line for an error, the usual exit statuses, imports when needed."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from checkpoints import TinyModel, write_checkpoint
from emberd.compile import cli
from emberd.compile.converted import ConvertedModel

TINY = TinyModel("cli", layers="DA", hidden=32, vocab=40, experts=3, shared=8)
COMMAND = [
    sys.executable,
    "-c",
    "import sys; from emberd.compile.cli import main; sys.exit(main())",
]


def test_convert_says_where_the_model_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_checkpoint(tmp_path / "source", TINY)
    model = tmp_path / "model"
    assert cli.main(["convert", str(source), "-o", str(model), "--name", "ember"]) == 0
    output = capsys.readouterr()
    assert output.out == f"ember: converted to {model}\n"
    assert output.err == ""  # no progress bar unless a terminal shows it
    assert ConvertedModel.load(model).name == "ember"


def test_errors_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", str(tmp_path / "nowhere")]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("emberc: error: ") and output.err.count("\n") == 1


@pytest.mark.parametrize("arguments", [["melt"], ["--melt"], ["inspect"], ["convert", "a"]])
def test_misuse_shows_the_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        cli.main(arguments)
    assert raised.value.code == 2
    assert "usage: emberc" in capsys.readouterr().err


def test_a_value_that_looks_like_an_option_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        cli.main(["simulate", "trace", "--budget", "-5%"])
    assert raised.value.code == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.endswith("one that begins with - is given as in --option=-5")


@pytest.mark.parametrize("arguments", [["--help"], ["inspect", "--help"], ["convert", "--help"]])
def test_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        cli.main(arguments)
    assert raised.value.code == 0
    printed = capsys.readouterr().out
    assert "usage: emberc" in printed
    if arguments == ["--help"]:
        assert all(summary in printed for _, summary in cli.COMMANDS.values())


def test_without_a_command_the_help_tells_which_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main([]) == 2
    printed = capsys.readouterr()
    assert not printed.out
    assert all(summary in printed.err for _, summary in cli.COMMANDS.values())


def test_every_command_has_a_module() -> None:
    for name in cli.COMMANDS:
        with pytest.raises(SystemExit) as raised:
            cli.main([name, "--help"])
        assert raised.value.code == 0


def test_an_interrupt_is_quiet(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(_: Any) -> NoReturn:
        raise KeyboardInterrupt

    module = SimpleNamespace(add_arguments=lambda parser: None, run=interrupt)
    monkeypatch.setattr(importlib, "import_module", lambda name: module)
    assert cli.main(["inspect"]) == 130
    assert capsys.readouterr().err == ""


def test_a_closed_pipe_is_quiet(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", TINY)
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        done = subprocess.run(
            [*COMMAND, "inspect", str(source)],
            stdout=write_end,
            stderr=subprocess.PIPE,
            check=False,
        )
    finally:
        os.close(write_end)
    assert done.returncode == 0 and done.stderr == b""


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys; from emberd.compile.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'numpy', 'onnx', 'onnxruntime', 'torch', 'tvm'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stdout.splitlines()[-1] == b"[]"


def test_a_device_install_says_how_to_get_the_compiler(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(cli.COMMANDS, "inspect", ("emberd.compile.no_such_module", "inspect"))
    assert cli.main(["inspect", "model"]) == cli.EXIT_ERROR
    assert "in a clone of emberd, pip install '.[compile]'" in capsys.readouterr().err
