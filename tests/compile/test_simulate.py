"""The command: tables, JSON and plots of a trace, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from activation_maps import random_map
from emberd.compile.cli import main
from emberd.compile.residency.trace import CommandTrace, TraceHeader, TraceWriter
from emberd.daemon.policies import POLICIES

HEADER = TraceHeader("ab" * 32, layers=3, experts=8, top_k=2, expert_bytes=1_000_000)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Two commands of 20 tokens, 5 of them prompt."""
    path = tmp_path / "commands.trace"
    writer = TraceWriter(path, HEADER)
    for seed, name in enumerate(("climate", "media")):
        draw = np.random.default_rng(seed)
        ids = np.argsort(draw.random((20, 3, 8)), axis=-1)[..., :2].astype(np.uint16)
        writer.append(CommandTrace(name, 5, ids, np.zeros(ids.shape, np.float16)))
    writer.finish(2)
    writer.close()
    return path


@pytest.fixture
def found(tmp_path: Path) -> Path:
    path = tmp_path / "a.map"
    path.write_bytes(random_map(3, 8, 2).to_bytes())
    return path


def test_a_table_of_all_policies(
    trace: Path, found: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", str(trace), "--map", str(found), "--budget", "50%"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "token_demand 6 experts, 6.00 MB" in lines[0]
    assert [line.split()[0] for line in lines[3:]] == list(POLICIES)
    assert lines[2].split() == ["policy", "50%", "(12", "slots)"]


def test_budgets_of_bytes_and_the_whole_bank(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    budgets = ["--budget", "6.5M", "--budget", "1G", "--policy", "lru", "--policy", "belady"]
    assert main(["simulate", str(trace), *budgets, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["policy"], row["slots"]) for row in rows] == [
        ("lru", 6),
        ("lru", 24),
        ("belady", 6),
        ("belady", 24),
    ]
    assert rows[1]["hit_rate"] == rows[3]["hit_rate"] > rows[2]["hit_rate"] > rows[0]["hit_rate"]
    assert rows[1]["read_bytes"] == 24 * 1_000_000 / 40


def test_without_a_map_policies_that_need_one_are_left_out(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", str(trace), "--json", "--cold", "--first", "9", "--chunk", "2"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["policy"] for row in rows} == {"lru", "belady"}
    assert {row["budget"] for row in rows} == {"12.5%", "25%", "50%"}


def test_predictors_are_compared(
    trace: Path, found: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["window", "token-transitions"]
    given = [*names, "layer-transitions"]
    chosen = [argument for name in given for argument in ("--predictor", name)]
    policy = ["--policy", "predictor-retained", "--policy", "lru", "--budget", "8M"]
    policy += ["--policy", "layer-ahead"]
    assert main(["simulate", str(trace), "--map", str(found), *policy, *chosen, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["policy"] for row in rows] == [
        *(f"predictor-retained ({name})" for name in names),
        "lru",
        "layer-ahead (layer-transitions)",
    ]


def test_a_budget_below_token_demand_is_said(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", str(trace), "--budget", "5M"]) == 0
    assert "note: 5M is less than token_demand" in capsys.readouterr().out


@pytest.mark.parametrize("answered", [True, False])
@pytest.mark.parametrize("chunk", ["1", "512"])
def test_a_trace_without_answers_is_told(
    answered: bool, chunk: str, found: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is expected of next layers counts in answers alone."""
    path = tmp_path / "commands.trace"
    writer = TraceWriter(path, replace(HEADER, next_layer=2))
    ids = np.argsort(np.random.default_rng(0).random((20, 3, 8)), axis=-1)[..., :2]
    prompt = 5 if answered else 20
    writer.append(
        CommandTrace(
            *("climate", prompt, ids.astype(np.uint16), np.zeros(ids.shape, np.float16)),
            next_layer=ids[prompt:, 1:].astype(np.uint16),
        )
    )
    writer.finish(1)
    writer.close()
    arguments = ["--map", str(found), "--chunk", chunk, "--budget", "50%"]
    assert main(["simulate", str(path), *arguments]) == 0
    printed = capsys.readouterr()
    assert ("layer-ahead (next-router)" in printed.out) == answered
    assert "layer-transitions" not in printed.out
    assert ("has no answers, only prompts" in printed.err) != answered
    assert ("or give --chunk 1" in printed.err) == (not answered and chunk != "1")


def test_a_plot_is_written(trace: Path, tmp_path: Path) -> None:
    plot = tmp_path / "hits.svg"
    assert main(["simulate", str(trace), "--policy", "lru", "--plot", str(plot)]) == 0
    assert plot.read_text().count("<polyline") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budget", "1M"], "a token needs 2 of a layer at once"),
        (["--budget", "25"], "--budget 25: 25 bytes; did you mean 25% or 25G?"),
        (["--budget", "x%"], "not a share such as 25%"),
        (["--budget=-5%"], "--budget -5%: not a share such as 25%"),
        (["--budget", "inf%"], "not a share such as 25%"),
        (["--budget", "6X"], "is not a size"),
        (["--policy", "map-pinned"], "--policy map-pinned: needs an activation map"),
        (["--policy", "read-ahead"], "--policy read-ahead: needs a predictor of tokens that come"),
        (["--policy", "layer-ahead"], "needs a predictor of a token's next layer"),
        (["--predictor", "lstm"], "--predictor lstm: expected one of previous-token, window;"),
        (["--chunk", "0"], "--chunk 0: expected 1 or more"),
        (["--map", "nowhere"], "nowhere: cannot be read"),
    ],
)
def test_what_it_refuses(
    trace: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["simulate", str(trace), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_map_of_another_model_is_refused(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.map"
    other.write_bytes(random_map(3, 8, 2, model="cd" * 32).to_bytes())
    assert main(["simulate", str(trace), "--map", str(other)]) == 2
    assert "made for another model" in capsys.readouterr().err
