"""The plan: sizes are those of the artifact that would be built, from headers alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from activation_maps import random_map
from checkpoints import MODELS, tensors, write_checkpoint
from emberd.compile import plan as plan_module
from emberd.compile.build import build
from emberd.compile.cli import main
from emberd.compile.convert import convert
from emberd.compile.quantize.recipes import RECIPES
from emberd.compile.residency.estimate import Estimate, Sizes
from emberd.compile.traffic import decode_traffic
from emberd.daemon.artifact import Artifact
from emberd.daemon.config import load
from emberd.daemon.program import Program, Section

MODEL = MODELS[0]
BANK = len(MODEL.layers) * MODEL.experts
RATES = ["--disk", "400MB/s", "--bandwidth", "10GB/s"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model") / "checkpoint", MODEL)


def plan(source: Path, capsys: pytest.CaptureFixture[str], *more: str) -> Any:
    """The JSON of a plan."""
    assert main(["plan", str(source), *RATES, "--json", *more]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("recipe", ["q4", "q8", "f32"])
def test_sizes_are_those_of_the_artifact(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], recipe: str
) -> None:
    build(checkpoint, tmp_path / "artifact", "host", recipe)
    artifact = Artifact.open(tmp_path / "artifact")
    made = plan(checkpoint, capsys, "--memory", "1G", "--recipe", recipe)
    (choice,) = made["choices"]
    sizes, sections = choice["sizes"], artifact.program.section_bytes
    assert sizes["weights_bytes"] == artifact.sizes["weights.bin"]
    assert sizes["expert_bytes"] * BANK == artifact.sizes["experts.bin"]
    assert sizes["expert_bytes"] == artifact.model.details["expert_bytes"]
    assert sizes["scratch_bytes"] == sections["scratch"]
    assert sizes["state_bytes"] == sections["state"]
    assert sizes["kv_bytes_per_token"] == sections["kv_per_token"]
    assert sizes["token_demand_bytes"] == 4 * 2 * sizes["expert_bytes"]
    traffic = decode_traffic(Program.decode(artifact.program), MODEL.vocab, 0)
    assert sizes["traffic_bytes"] == round(traffic.total - traffic.by_section[Section.KV])
    assert choice["verdict"] == "fits whole" and choice["estimate"]["hit_rate"] == 1
    assert made["best"] == recipe


def test_headers_are_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Weights that no conversion would take are not looked at."""
    weights = {name: np.full_like(value, np.nan) for name, value in tensors(MODEL).items()}
    source = write_checkpoint(tmp_path / "checkpoint", MODEL, weights)
    assert plan(source, capsys, "--memory", "1G")["best"] == "q8"


def test_a_converted_model_has_the_plan_of_its_checkpoint(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    convert(checkpoint, tmp_path / "converted", name="checkpoint")
    arguments = ("--memory", "1G", "--recipe", "q4")
    assert plan(tmp_path / "converted", capsys, *arguments) == plan(checkpoint, capsys, *arguments)


def test_verdicts_follow_the_memory(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = plan(checkpoint, capsys, "--memory", "1G", "--recipe", "q4")
    (choice,) = made["choices"]
    fixed, expert = choice["estimate"]["fixed_bytes"], choice["sizes"]["expert_bytes"]
    for slots, verdict in (
        (BANK, "fits whole"),
        (BANK - 1, "streams experts"),
        (8, "streams experts"),
        (7, "below token_demand"),
        (1, "does not fit"),
    ):
        memory = str(fixed + slots * expert)
        made = plan(checkpoint, capsys, "--memory", memory, "--recipe", "q4")
        assert made["choices"][0]["verdict"] == verdict
        assert made["choices"][0]["estimate"]["slots"] == slots
        assert made["best"] == (None if slots == 1 else "q4")


def test_the_most_faithful_recipe_that_fits_is_best(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = plan(checkpoint, capsys, "--memory", "1G")
    choices = {choice["recipe"]: choice for choice in made["choices"]}
    assert list(choices) == list(RECIPES)
    assert choices["f32"]["verdict"] == "fits whole" and made["best"] == "q8"
    q4 = choices["q4"]
    between = q4["estimate"]["fixed_bytes"] + BANK * q4["sizes"]["expert_bytes"]
    made = plan(checkpoint, capsys, "--memory", str(between))
    assert made["best"] == "q4"
    assert made["helps"][0]["tokens_per_second"] == max(
        entry["tokens_per_second"] for entry in made["helps"]
    )


def test_without_a_disk_rates_are_told_for_usual_ones(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (whole,) = plan(checkpoint, capsys, "--memory", "1G", "--recipe", "q4")["choices"]
    memory = str(whole["estimate"]["fixed_bytes"] + 16 * whole["sizes"]["expert_bytes"])
    arguments = ["plan", str(checkpoint), "--bandwidth", "10GB/s", "--memory", memory]
    assert main([*arguments, "--recipe", "q4", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    (choice,) = made["choices"]
    assert made["device"]["disk"] is None and made["helps"] == []
    for disk, rate in zip(made["disks"], choice["rates"], strict=True):
        given = ("--memory", memory, "--recipe", "q4", "--disk", str(disk))
        assert plan(checkpoint, capsys, *given)["choices"][0]["rates"] == [rate]
    assert sorted(choice["rates"]) == choice["rates"] and len(set(choice["rates"])) == 3
    assert choice["estimate"]["read_bytes"] == 4 * 2 * 0.5 * choice["sizes"]["expert_bytes"]
    assert main([*arguments, "--recipe", "q4"]) == 0
    text = capsys.readouterr().out
    assert "400.00 MB/s" in text and "for want of --disk" in text
    assert "to read memory, 4.0 experts from disk" in text


def test_which_recipe_is_best_may_depend_on_the_disk(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here q8 is the one that computes faster, and the one that reads more."""
    (q8,) = plan(checkpoint, capsys, "--memory", "1G", "--recipe", "q8")["choices"]

    def estimated(sizes: Sizes, *_: object) -> Estimate:
        if sizes.expert_bytes == q8["sizes"]["expert_bytes"]:
            return Estimate(0, 8, 0.5, memory_seconds=0.01, read_bytes=4e6)
        return Estimate(0, 8, 0.5, memory_seconds=0.02, read_bytes=1e6)

    monkeypatch.setattr(plan_module, "estimate", estimated)
    for disk, recipe in (("100MB/s", "q4"), ("2GB/s", "q8")):
        assert plan(checkpoint, capsys, "--memory", "1G", "--disk", disk)["best"] == recipe
    assert main(["plan", str(checkpoint), "--bandwidth", "10GB/s", "--memory", "1G"]) == 0
    assert "which recipe is best depends on the disk: give --disk" in capsys.readouterr().out


def test_the_text_says_what_to_use_and_what_would_help(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = plan(checkpoint, capsys, "--memory", "1G", "--recipe", "q4")
    (choice,) = made["choices"]
    memory = choice["estimate"]["fixed_bytes"] + 16 * choice["sizes"]["expert_bytes"]
    found = tmp_path / "map"
    found.write_bytes(random_map(4, 8, 2).to_bytes())
    arguments = ["plan", str(checkpoint), *RATES, "--memory", str(memory), "--map", str(found)]
    assert main([*arguments, "--recipe", "q4"]) == 0
    text = capsys.readouterr().out
    assert "16 of 32" in text and "use q4: streams experts" in text
    assert "of experts at once, 8 of them (2 in each of 4 layers)" in text
    assert "hits: of the experts that the map has most mass for" in text
    assert "a disk twice as fast: " in text and "memory for all experts" in text


def test_the_text_says_what_to_write_for_the_daemon(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    use = ("--recipe", "q4", "--sessions", "3", "--context", "64")
    (choice,) = plan(checkpoint, capsys, "--memory", "1G", *use)["choices"]
    assert choice["expert_budget"] == -1
    arguments = ["plan", str(checkpoint), *RATES, *use, "--memory"]
    assert main([*arguments, "1G"]) == 0
    assert "expert_budget" not in capsys.readouterr().out
    expert = choice["sizes"]["expert_bytes"]
    assert main([*arguments, str(choice["estimate"]["fixed_bytes"] + 7 * expert + 5)]) == 0
    text = capsys.readouterr().out
    assert "with memory for fewer, none that it used is there for the next token" in text
    _, _, after = text.partition("write into the file of emberd serve --config\n")
    path = tmp_path / "emberd.yaml"
    path.write_text("".join(f"{line.strip()}\n" for line in after.splitlines()[:3]))
    read = load(path, {})
    assert (read.expert_budget, read.slots, read.context) == (7 * expert, 3, 64)


def test_what_cannot_fit_says_how_much_is_needed(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(checkpoint), *RATES, "--memory", "1M"]) == 0
    assert "does not fit: at least " in capsys.readouterr().out


def test_memory_is_measured_where_it_can_be(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Measured:
        def measure(self, threads: int) -> float:
            return 12e9 + threads

    monkeypatch.setattr(plan_module, "MemoryRead", Measured)
    arguments = ["plan", str(checkpoint), "--memory", "1G", "--disk", "1G", "--recipe", "q4"]
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["device"]["bandwidth"] // 10**9 == 12
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    assert main([*arguments, "--target", "x86-64"]) == 2
    assert "--bandwidth" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--memory", "much"], "'much' is not a size"),
        (["--memory", "6"], "--memory 6: 6 bytes; did you mean 6G?"),
        (["--memory", "6G", "--disk", "400"], "--disk 400: 400 bytes/s; did you mean 400MB/s?"),
        (["--memory", "6G", "--bandwidth", "25"], "did you mean 25GB/s?"),
        (["--memory", "1G", "--context", "0"], "--context 0: expected 1 to 4096"),
        (["--memory", "1G", "--context", "4097"], "--context 4097"),
        (["--memory", "1G", "--sessions", "0"], "--sessions 0"),
        (["--memory", "1G", "--target", "toaster"], "unknown target 'toaster'"),
        (["--memory", "1G", "--map", "nowhere"], "nowhere: cannot be read"),
    ],
)
def test_what_it_refuses(
    checkpoint: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    assert main(["plan", str(checkpoint), *RATES, *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_map_of_another_shape_is_refused(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "map").write_bytes(random_map(3, 8, 2).to_bytes())
    arguments = ["--memory", "1G", "--map", str(tmp_path / "map")]
    assert main(["plan", str(checkpoint), *RATES, *arguments]) == 2
    assert "is of 3 layers of 8 experts, this model has 4 of 8" in capsys.readouterr().err
