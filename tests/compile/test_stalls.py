"""emberc stalls: the whole model's logits come first, and what settings change is measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from emberd.compile.cli import main
from emberd.compile.stalls import Text, measure
from emberd.daemon.artifact import Artifact
from emberd.daemon.shortcuts import Shortcuts
from needs import needs

needs("tvm")

EXPERT_BYTES, LAYERS, TOP_K = 24576, 4, 2
TOKENS = [(7 * i * i + 3 * i) % 500 for i in range(40)]
MORE = "more than 0, at most"


@pytest.fixture(scope="module")
def demo(demo_artifact: Path) -> Artifact:
    return Artifact.open(demo_artifact)


def test_every_setting_decodes_the_same_tokens(demo: Artifact) -> None:
    texts = [Text(TOKENS[:9], TOKENS[9:]), Text(TOKENS[:4], [])]
    settings = [Shortcuts(), Shortcuts(1.0), Shortcuts(0.0, 1e-9, 1.0)]
    rows = measure(demo, 16 * EXPERT_BYTES, texts, settings, max_tokens=31, threads=1)
    assert [row.shortcuts for row in rows] == [Shortcuts(), *settings]
    count = 31 + len(texts[1].decoded)
    for row in rows:
        cost = row.run.cost
        assert len(row.run.stalls) == count > 31
        assert cost.hits + cost.misses == count * LAYERS * TOP_K
        assert min(row.run.stalls) >= 0
        assert sum(row.run.stalls) == pytest.approx(cost.stall_nanoseconds / 1e9)
    exact, same, margin, deadline = rows
    for row in (exact, same):
        assert row.comparison.max_kl == row.run.cost.substituted == row.run.cost.skipped == 0
        assert row.run.cost.bytes == row.run.cost.misses * EXPERT_BYTES
    assert margin.run.cost.substituted > 0 and margin.run.hit_rate > exact.run.hit_rate
    assert deadline.run.cost.skipped > 0 and deadline.run.cost.substituted == 0
    assert min(margin.comparison.mean_kl, deadline.comparison.mean_kl) > 0


@pytest.mark.parametrize("complete", [True, False, None])
def test_the_table_has_a_line_for_every_setting(
    demo_artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], complete: bool | None
) -> None:
    options = ["--budget", "50%", "--first", "2", "--max-tokens", "5", "--threads", "1"]
    if complete is not None:
        messages = [{"role": "user", "content": "Set the driver temperature to 23"}]
        if complete:
            messages.append({"role": "assistant", "content": "Setting it to 23."})
        path = tmp_path / "commands.jsonl"
        path.write_text(json.dumps({"class": "climate", "messages": messages}))
        options += ["--commands", str(path)]
    margins = ["--routing-margin", "0.5", "--stall-deadline", "20"]
    assert main(["stalls", str(demo_artifact), *options, *margins]) == 0
    head, names, *lines = capsys.readouterr().out.splitlines()
    decoded, texts = (10, 2) if complete is None else (5, 1)
    assert head.startswith(
        f"32 of 64 experts in memory at most, {decoded} tokens decoded in {texts}"
    )
    assert names.split()[:2] == ["routing_margin", "stall_deadline"]
    assert [tuple(line.split()[:2]) for line in lines] == [
        ("-", "-"),
        ("-", "20"),
        ("0.5", "-"),
        ("0.5", "20"),
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--budget", "1KB"], "a token needs 2 of a layer at once"),
        (
            ["--budget", "100%"],
            "--budget 100%: all 64 experts are in memory then, and no token",
        ),
        (["--budget", "200%"], "expected less than 1.57 MB"),
        (["--routing-margin", "1.5"], f"--routing-margin 1.5: expected {MORE} 1"),
        (["--routing-margin", "nan"], f"--routing-margin nan: expected {MORE} 1"),
        (["--routing-margin", "0.0"], f"--routing-margin 0.0: expected {MORE} 1"),
        (["--routing-margin", "much"], f"--routing-margin much: expected {MORE} 1"),
        (["--stall-deadline", "-1"], f"--stall-deadline -1: expected {MORE} 60000 ms"),
        (["--stall-deadline", "0"], f"--stall-deadline 0: expected {MORE} 60000 ms"),
        (["--stall-deadline", "7e4"], f"--stall-deadline 7e4: expected {MORE} 60000 ms"),
        (["--stall-weight", "2"], "--stall-weight 2: expected 0 to 1"),
        (["--first", "0"], "--first 0: expected 1 or more"),
        (["--max-tokens", "0"], "--max-tokens 0: expected 1 or more"),
        (["--max-tokens", "100000"], "--max-tokens 100000: expected less than"),
        (["--commands", "/dev/null"], "/dev/null: no commands"),
    ],
)
def test_what_cannot_be_measured_is_said(
    demo_artifact: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert main(["stalls", str(demo_artifact), *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("emberc: error: ") and message in line
