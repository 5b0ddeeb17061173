"""Rows: medians, best values, ratios and what they must be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.table import Row, markdown, row, write_json

VALUES = {"emberd": [3.0, 1.0, 8.0], "peer": [2.0, 2.0, 5.0]}


@pytest.mark.parametrize(
    ("figure", "threads", "must", "aim"),
    [
        ("decode, context 0", 1, 1.3, 1.5),
        ("decode, context 0", 2, 1.25, 1.5),
        ("decode, context 8192", 2, 1.3, 1.6),
        ("decode, context 1024", 1, None, None),
        ("prefill 128", 1, 2.5, 3.5),
        ("decode, 4 streams", 2, 1.5, 2.5),
    ],
)
def test_row_of_a_rate(figure: str, threads: int, must: float | None, aim: float | None) -> None:
    assert row(figure, threads, "tok/s", "higher", VALUES) == Row(
        figure, threads, "tok/s", "higher", 3.0, 2.0, 1.5, must, aim, 8.0, 5.0, 3
    )


@pytest.mark.parametrize(
    ("figure", "better", "emberd", "holds"),
    [
        ("prefill 512", "higher", 24.9, False),
        ("prefill 512", "higher", 25.0, True),
        ("peak memory", "lower", 6.0, True),
        ("peak memory", "lower", 6.1, False),
        ("prefill 32", "higher", 1.0, None),
        ("fifth, 25 % of experts, hit rate", "higher", -5.0, True),
        ("fifth, 25 % of experts, hit rate", "higher", -5.1, False),
    ],
)
def test_what_must_hold(figure: str, better: str, emberd: float, holds: bool | None) -> None:
    assert row(figure, 1, "", better, {"emberd": [emberd], "peer": [10.0]}).holds is holds


def test_best_of_what_should_be_low_is_the_lowest() -> None:
    result = row("load to first token", 1, "s", "lower", VALUES)
    assert (result.emberd_best, result.peer_best) == (1.0, 2.0)


def test_json_is_a_list_of_rows(tmp_path: Path) -> None:
    write_json([row("prefill 128", 2, "tok/s", "higher", VALUES)], tmp_path / "bench.json")
    (read,) = json.loads((tmp_path / "bench.json").read_text())
    assert read["figure"] == "prefill 128"
    assert {"threads", "unit", "better", "emberd", "peer", "ratio", "must", "aim"} <= read.keys()
    assert read["ratio"] == 1.5


def test_markdown_marks_what_does_not_hold() -> None:
    rows = [
        row("prefill 128", 1, "tok/s", "higher", VALUES),
        row("prefill 32", 1, "tok/s", "higher", VALUES),
        row("peak memory", 2, "MiB", "lower", {"emberd": [1200.0], "peer": [2400.0]}),
        row(
            "fifth, 50 % of experts, hit rate", 2, "%", "higher", {"emberd": [40.0], "peer": [64.0]}
        ),
    ]
    assert markdown(rows).splitlines()[2:] == [
        "| prefill 128 | 1 | tok/s | 3 (8) | 2 (5) | 1.50 ✗ | ≥ 2.5 | ≥ 3.5 |",
        "| prefill 32 | 1 | tok/s | 3 (8) | 2 (5) | 1.50 |  |  |",
        "| peak memory | 2 | MiB | 1200 (1200) | 2400 (2400) | 0.50 | ≤ 0.6 | ≤ 0.5 |",
        "| fifth, 50 % of experts, hit rate | 2 | % | 40 (40) | 64 (64) | 0.62 ✗ | within 15 |  |",
    ]
