"""The share of a token outside kernels, on the embedded model."""

from __future__ import annotations

from pathlib import Path

from emberd.daemon.artifact import Artifact

from bench import outside
from bench.outside import Token


def test_every_way_of_sampling_is_measured(demo_artifact: Path) -> None:
    found = outside.measure(Artifact.open(demo_artifact), threads=1, tokens=32, rounds=2)
    assert list(found) == list(outside.SAMPLINGS)
    for answers in found.values():
        assert len(answers) == 2
        for token in answers:
            assert token.outside < token.seconds


def test_the_table_has_medians_and_marks_what_is_too_much() -> None:
    few, much = Token(0.01, 0.0002), Token(0.02, 0.0008)
    assert outside.table(2, {"greedy": [few, few, much], "temperature 1": [much]}).splitlines()[
        2:
    ] == [
        "| greedy | 2 | 200 | 10000 | 2.0 | < 3 |",
        "| temperature 1 | 2 | 800 | 20000 | 4.0 |  |",
    ]
    assert outside.table(1, {"greedy": [much]}).endswith(
        "| greedy | 1 | 800 | 20000 | 4.0 | < 3 ✗ |"
    )
