"""`emberc predict` on traces written to files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from emberd.compile.cli import main
from emberd.compile.predict.network import to_onnx
from emberd.compile.residency.trace import CommandTrace, TraceHeader, TraceWriter
from needs import needs
from predictor_networks import random_weights
from routed_commands import CYCLE, counted, cycle


def write(path: Path, commands: Sequence[CommandTrace], header: TraceHeader = CYCLE) -> Path:
    writer = TraceWriter(path, header)
    for command in commands:
        writer.append(command)
    writer.finish(len(commands))
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
    assert cells["previous-token"][:-1] == [
        "-",
        "0.0%",
        "0.0%",
        "0.0%",
        "100.0%",
        "100.0%",
        "100.0%",
    ]
    assert cells["token-transitions"][:-1] == ["-", *["100.0%"] * 6]
    assert cells["layer-transitions"][:-1] == ["100.0%", "100.0%", "-", "-", "-"]


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


def test_a_network_is_judged_and_timed_as_compiled(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    needs("tvm")
    network = tmp_path / "predictor.onnx"
    network.write_bytes(to_onnx(random_weights(CYCLE, 32, 32), CYCLE).SerializeToString())
    assert main(["predict", str(trace), "--lstm", str(network), "--json"]) == 0
    rows = [row for row in json.loads(capsys.readouterr().out) if row["predictor"] == "lstm"]
    assert [(row["horizon"], row["budget"]) for row in rows] == [
        (horizon, budget) for horizon in (1, 2, 3) for budget in (2, 4)
    ]
    assert all(row["microseconds"] > 0 for row in rows)
    assert main(["predict", str(trace), "--lstm", str(tmp_path)]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_routers_that_were_asked_are_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that knows the next layer's experts, but puts one of them third."""
    found = cycle(20, 8)
    chosen = found.ids[8:, 1:]
    expected = np.stack([chosen[..., 0], (chosen[..., 0] + 3) % 6, chosen[..., 1]], axis=-1)
    header = replace(CYCLE, next_layer=3)
    path = write(tmp_path / "asked", [replace(found, next_layer=expected)], header)
    assert main(["predict", str(path)]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.split() == ["next-router", "50.0%", "100.0%", "-", "-", "-", "-"]
