"""`emberc bench` on a tiny model: what it runs, what it prints, what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import TinyModel, write_checkpoint
from emberd.compile import bandwidth, bench
from emberd.compile.bench import Timing, kernel_table
from emberd.compile.build import build
from emberd.compile.cli import main
from emberd.compile.convert import convert
from emberd.daemon.artifact import Artifact
from emberd.daemon.profile import KernelCost

TINY = TinyModel("bench", layers="DA", hidden=64, vocab=64)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench")
    write_checkpoint(folder / "checkpoint", TINY)
    convert(folder / "checkpoint", folder / "converted")
    build(folder / "converted", folder / "artifact", "host", "q4", chunk_sizes=(1, 128))
    return folder / "artifact"


@pytest.fixture(autouse=True)
def small_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "_BYTES", 1 << 20)


@pytest.mark.parametrize("context", [0, 70])
def test_measures_what_it_says(artifact: Path, context: int) -> None:
    opened = Artifact.open(artifact)
    result = bench.measure(opened, 1, context)
    assert (result.threads, result.context) == (1, context)
    decoded = sum(cost.calls for cost in result.decode.costs if cost.symbol.startswith("embedding"))
    assert decoded == len(result.decode.rounds) * result.decode.tokens
    assert 0 < result.decode.rate <= result.decode.best_rate
    assert result.prefill.tokens == 512
    inside = sum(cost.seconds for cost in result.decode.costs)
    assert 0 < inside <= sum(result.decode.rounds)
    assert {cost.symbol for cost in result.decode.costs} >= set(result.kernel_bytes)
    assert result.token_bytes == pytest.approx(sum(result.kernel_bytes.values()))


def test_more_context_is_more_bytes(artifact: Path) -> None:
    opened = Artifact.open(artifact)
    short, long = (bench.measure(opened, 1, context).token_bytes for context in (0, 1000))
    assert long - short == 1000 * opened.program.section_bytes["kv_per_token"]


def test_prints_rates_and_kernels(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", str(artifact), "--threads", "2", "--context", "3", "--profile"]) == 0
    printed = capsys.readouterr().out
    for expected in ("threads      2", "tok/s after 3 tokens", "of memory read", "acquire_experts"):
        assert expected in printed
    assert printed.count("(outside kernels)") == 2


@pytest.mark.parametrize("context", ["-1", "4000"])
def test_refuses_a_context_that_does_not_fit(
    artifact: Path, context: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", str(artifact), "--context", context]) == 2
    assert f"--context {context}: expected 0 to 3935 tokens" in capsys.readouterr().err


COSTS = [KernelCost("linear_of_a_long_name", 8, 0.006), KernelCost("norm", 16, 0.002)]


@pytest.mark.parametrize(
    ("columns", "lines"),
    [
        (
            120,
            [
                "kernel                     us  calls     MB   GB/s  share",
                "linear_of_a_long_name    1500      2  30.00   20.0  60.0% " + 24 * "#",
                "norm                      500      4                20.0% " + 8 * "#",
                "(outside kernels)         500      1                20.0% " + 8 * "#",
            ],
        ),
        (
            70,
            [
                "kernel                     us  calls     MB   GB/s  share",
                "linear_of_a_long_name    1500      2  30.00   20.0  60.0% " + 12 * "#",
                "norm                      500      4                20.0% " + 4 * "#",
                "(outside kernels)         500      1                20.0% " + 4 * "#",
            ],
        ),
        (
            10,
            [
                "kernel                    us  calls     MB   GB/s  share",
                "linear_of_a_long_n..    1500      2  30.00   20.0  60.0%",
                "norm                     500      4                20.0%",
                "(outside kernels)        500      1                20.0%",
            ],
        ),
    ],
)
def test_kernel_table(columns: int, lines: list[str]) -> None:
    timing = Timing(2, (0.004, 0.006), COSTS)
    table = kernel_table(timing, 4, {"linear_of_a_long_name": 3e7}, columns)
    assert table.splitlines() == lines
    assert max(map(len, lines)) <= max(columns, 56)
