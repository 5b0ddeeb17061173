"""`emberc predict` on traces written to files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from emberd.compile.cli import main
from emberd.compile.residency.trace import CommandTrace, TraceHeader, TraceWriter
from needs import needs
from routed_commands import CYCLE, counted, cycle


def write(path: Path, commands: Sequence[CommandTrace], header: TraceHeader = CYCLE) -> Path:
    writer = TraceWriter(path, header)
    for command in commands:
        writer.append(command)
    writer.close()
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write(tmp_path / "trace", [cycle(34, 16), cycle(25, 16, start=1)])


@pytest.fixture
def learnt(tmp_path: Path) -> Path:
    path = tmp_path / "map"
    path.write_bytes(counted(CYCLE, [cycle(301, 0)]).to_bytes())
    return path


def test_a_table_of_what_each_predictor_recalls(
    trace: Path, learnt: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["predict", str(trace), "--map", str(learnt)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "2 layers of 6 experts, 2 chosen" in lines[0] and "2 and 4 predicted" in lines[0]
    cells = {line.split()[0]: line.split()[1:] for line in lines[3:]}
    assert cells["previous-token"] == ["-", "0.0%", "0.0%", "0.0%", "100.0%", "100.0%", "100.0%"]
    assert cells["token-transitions"] == ["-", *["100.0%"] * 6]
    assert cells["layer-transitions"] == ["100.0%", "100.0%", "-", "-", "-"]


def test_json_has_a_row_for_each_figure(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a map, of the predictors that need none."""
    assert main(["predict", str(trace), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["horizon"], row["budget"]) for row in rows] == [
        (horizon, budget) for horizon in (1, 2, 3) for budget in (2, 4)
    ] * 2
    assert {row["predictor"] for row in rows} == {"previous-token", "window"}
    recalls = [row["recall"] for row in rows if row["predictor"] == "previous-token"]
    assert recalls == [0, 0, 0, 1, 1, 1]


def test_errors_are_one_line(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    other.write_bytes(replace(counted(CYCLE, [cycle(9, 0)]), model="cd" * 32).to_bytes())
    for arguments, message in (
        ([str(trace), "--map", str(other)], "made for another model"),
        ([str(write(tmp_path / "none", []))], "none: no commands"),
        ([str(write(tmp_path / "read", [cycle(9, 9)]))], "no answers"),
    ):
        assert main(["predict", *arguments]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1


def test_a_network_is_trained_and_judged(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    needs("torch")
    network = tmp_path / "predictor.onnx"
    train = ["--train", str(write(tmp_path / "learn", [cycle(60, 0)])), "--steps", "2"]
    assert main(["predict", str(trace), "--lstm", str(network), *train]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].startswith("lstm ") and len(lines[-2].split()) == 8
    assert lines[-1].startswith("lstm: 59")
    assert main(["predict", str(trace), "--lstm", str(network)]) == 0
    assert capsys.readouterr().out.splitlines() == lines


def test_training_needs_a_trace_to_learn_from(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    needs("torch")
    network = ["--lstm", str(tmp_path / "predictor.onnx")]
    short = write(tmp_path / "short", [cycle(1, 0)])
    for arguments, message in (
        (["--train", str(trace)], "say with --lstm"),
        (["--train", str(short), *network], "short: no command of two tokens"),
        (["--train", str(trace), "--steps", "0", *network], "--steps 0"),
        (network, "predictor.onnx: cannot be read"),
    ):
        assert main(["predict", str(trace), *arguments]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
