"""`emberc verify`: what it prints, and that it finds an artifact that computes something else."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from checkpoints import TinyModel, tensors, write_checkpoint
from emberd.compile import verify as verify_module
from emberd.compile.build import build
from emberd.compile.cli import main
from emberd.compile.convert import convert
from emberd.compile.quantised_oracle import quantised_oracle
from emberd.compile.quantize.recipes import RECIPES
from emberd.compile.verify import Verification, compare, unsettled, verify
from emberd.daemon.artifact import Artifact

# Every token passes every expert: rounding cannot change which ones.
TINY = TinyModel("verified", layers="DA", hidden=64, experts=2, top_k=2, intermediate=32)
TOKENS = np.random.default_rng(0).permutation(TINY.vocab)[:40].tolist()
POSITION = 23
DEMO = Path(__file__).parents[2] / "firmware_assets" / "demo" / "model"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """checkpoint, converted, and an artifact for each recipe."""
    folder = tmp_path_factory.mktemp("verified")
    convert(write_checkpoint(folder / "checkpoint", TINY), folder / "converted")
    for recipe in RECIPES:
        build(folder / "converted", folder / recipe, "host", recipe, chunk_sizes=(1, 8))
    (folder / "tokens.json").write_text(json.dumps(TOKENS))
    return folder


@pytest.fixture(params=RECIPES)
def changed(request: pytest.FixtureRequest, folder: Path, tmp_path: Path) -> Path:
    """An artifact of the same model but for the embedding of the token at POSITION."""
    weights = tensors(TINY)
    weights["model.embed_tokens.weight"][TOKENS[POSITION]] *= -1
    write_checkpoint(tmp_path / "checkpoint", TINY, weights)
    build(tmp_path / "checkpoint", tmp_path / "changed", "host", request.param, chunk_sizes=(1, 8))
    return tmp_path / "changed"


def _run(artifact: Path, folder: Path, *arguments: str) -> int:
    return main(["verify", str(artifact), "--against", str(folder / "converted"), *arguments])


def test_an_f32_artifact_has_one_error(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(folder / "f32", folder) == 0
    output = capsys.readouterr()
    assert output.err == ""
    number = r"[-+.e\d]+"
    assert re.fullmatch(
        rf"arithmetic, against onnxruntime on the same numbers: max \|dlogit\| {number} "
        rf"\(std {number}\), KL max {number} mean {number}, top-1 agreement 100\.00%, "
        r"first top-1 divergence: none\n"
        rf"within bounds: \|dlogit\| of the arithmetic is at most {number} \(0\.001 of std\) "
        r"at 64 of 64 positions\n",
        output.out,
    )


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "f32"])
def test_errors_of_a_quantised_artifact_are_told_apart(
    folder: Path, recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(folder / recipe, folder) == 0
    *lines, verdict = capsys.readouterr().out.splitlines()
    labels = [line.partition(",")[0] for line in lines]
    assert labels == ["arithmetic", "rounded activations", "quantised weights"]
    assert verdict.startswith("within bounds: KL of the arithmetic is at most ")
    assert verdict.endswith("quantised weights change has no bound: here it is of random tokens")
    found = verify(folder / recipe, folder / "converted", TOKENS)
    assert found.arithmetic.max_kl <= 1e-3
    assert found.arithmetic.mean_kl < found.activations.mean_kl
    assert found.activations.mean_kl < found.weights.mean_kl


def test_a_difference_is_located(
    changed: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(changed, folder, "--tokens", str(folder / "tokens.json")) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"emberc: error: {changed} differs from ")
    assert f"the first position out of bounds is {POSITION} (" in error
    assert error.count("\n") == 1 and ("try some with --seed" in error) == (
        Artifact.open(changed).model.recipe != "f32"
    )


def test_what_onnxruntime_does_not_settle_is_not_judged(
    changed: Path,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As if onnxruntime were undecided everywhere, then everywhere but where the error begins."""
    arguments = ("--tokens", str(folder / "tokens.json"))
    settled: list[int] = []

    def undecided(session: object, tokens: list[int], logits: object) -> np.ndarray:
        return ~np.isin(np.arange(len(tokens)), settled)

    monkeypatch.setattr(verify_module, "unsettled", undecided)
    assert _run(changed, folder, *arguments) == 0
    printed = capsys.readouterr().out
    found = re.search(r"not judged: (\d+) of 40 positions out of bounds", printed)
    assert found is not None and f"at {40 - int(found[1])} of 40 positions" in printed
    settled.append(POSITION)
    assert _run(changed, folder, *arguments) == 2
    assert f"the first position out of bounds is {POSITION} (" in capsys.readouterr().err


def test_what_is_no_number_is_judged() -> None:
    """Even where nothing is settled."""
    logits = np.array([[0.0, 1.0], [2.0, 0.0], [np.nan, np.inf]], np.float32)
    found = Verification(
        "q4a8",
        arithmetic=compare(logits, np.zeros_like(logits)),
        activations=compare(np.zeros_like(logits), np.zeros_like(logits)),
        weights=compare(np.zeros_like(logits), np.zeros_like(logits)),
        unsettled=np.ones(len(logits), bool),
    )
    assert found.excused.tolist() == [True, True, False]
    assert found.first_out_of_bounds == 2


def test_at_least_one_position_has_to_be_judged(
    changed: Path,
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokens = tmp_path / "tokens.json"
    tokens.write_text(json.dumps([TOKENS[POSITION]]))
    monkeypatch.setattr(verify_module, "unsettled", lambda *_: np.ones(1, bool))
    assert _run(changed, folder, "--tokens", str(tokens)) == 2
    assert "onnxruntime settles none: try other sequences" in capsys.readouterr().err


def test_rounded_sums_are_unsettled_here_and_there(tmp_path: Path) -> None:
    """Of the embedded model with int8 activations; floats are settled."""
    model = convert(DEMO, tmp_path / "converted")
    tokens = np.random.default_rng(0).integers(0, model.dimensions.vocab_size, 64).tolist()
    shares = {}
    for recipe in ("q4a8", "f32"):
        session = quantised_oracle(model, RECIPES[recipe]).session()
        found = unsettled(session, tokens, session.fork().step(tokens))
        shares[recipe] = found.mean()
    assert 0 < shares["q4a8"] < 0.9 and shares["f32"] == 0


def test_seeds_are_other_tokens(folder: Path) -> None:
    first, second, again = (
        verify(folder / "q4", folder / "converted", seed=seed) for seed in (0, 1, 0)
    )
    assert str(first) == str(again) != str(second)


def test_what_no_token_reaches_is_not_seen(changed: Path, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokens.json").write_text(json.dumps(TOKENS[:POSITION]))
    assert _run(changed, folder, "--tokens", str(tmp_path / "tokens.json")) == 0


@pytest.mark.parametrize("file", ["weights.bin", "experts.bin", "program.msgpack"])
def test_a_damaged_file_is_named(
    folder: Path, tmp_path: Path, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    artifact = tmp_path / "damaged"
    artifact.mkdir()
    for path in (folder / "f32").iterdir():
        (artifact / path.name).write_bytes(path.read_bytes())
    data = bytearray((artifact / file).read_bytes())
    data[len(data) // 2] ^= 1
    (artifact / file).write_bytes(data)
    assert _run(artifact, folder) == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.count("\n") == 1
    assert f"{file} is damaged" in output.err


def test_a_seed_below_0_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(folder / "f32", folder, "--seed=-1") == 2
    assert "--seed -1: expected 0 or more" in capsys.readouterr().err


def test_another_model_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = TinyModel("other", layers="D", hidden=64, vocab=95)
    convert(write_checkpoint(tmp_path / "checkpoint", other), tmp_path / "converted")
    assert _run(folder / "f32", tmp_path) == 2
    error = capsys.readouterr().err
    assert "was not built from" in error and error.count("\n") == 1


def test_equal_logits_differ_by_nothing() -> None:
    logits = np.random.default_rng(0).standard_normal((5, 7)).astype(np.float32)
    comparison = compare(logits, logits)
    assert comparison.max_difference == comparison.max_kl == comparison.mean_kl == 0
    assert comparison.top1_agreement == 1
    assert comparison.first_divergence is None


def test_divergence_is_of_the_reference_to_the_logits() -> None:
    """At the second position p = (3/4, 1/4) against q = (1/4, 3/4): KL = ln 3 / 2."""
    reference = np.log([[0.5, 0.5], [0.75, 0.25], [0.1, 0.9]]).astype(np.float32)
    logits = np.log([[0.5, 0.5], [0.25, 0.75], [0.1, 0.9]]).astype(np.float32) + 3
    comparison = compare(logits, reference)
    assert comparison.max_kl == pytest.approx(np.log(3) / 2, rel=1e-6)
    assert comparison.mean_kl == pytest.approx(np.log(3) / 6, rel=1e-6)
    assert comparison.top1_agreement == pytest.approx(2 / 3)
    assert comparison.first_divergence == 1


@pytest.mark.parametrize("recipe", ["f32", "q4"])
def test_not_a_number_is_out_of_bounds(recipe: str) -> None:
    reference = np.array([[0.0, 1.0], [2.0, 0.0]], np.float32)
    broken = reference.copy()
    broken[1, 0] = np.nan
    same = compare(reference, reference)
    assert Verification(recipe, compare(broken, reference), same, same).first_out_of_bounds == 1
