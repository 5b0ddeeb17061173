"""`emberc verify`: an artifact against the converted model it was built from, in onnxruntime."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from emberd.compile.converted import ConvertedModel
from emberd.compile.oracle import Oracle, OracleSession
from emberd.compile.quantised_oracle import dequantised, quantised_oracle
from emberd.compile.quantize.recipes import RECIPES
from emberd.compile.run import core_logits, read_tokens
from emberd.daemon.artifact import Artifact
from emberd.daemon.errors import EmberdError

DEFAULT_TOKENS = 64
MAX_DIFFERENCE = 1e-3  # of the logits' standard deviation, where nothing is quantised
MAX_KL = 1e-3  # nats a position, where something is
NUDGES = (1e-6, 1e-5) * 4  # relative changes of embeddings, about what floats added otherwise make
_HINT = (
    "; if rounding is the cause, a number on the edge between two roundings that sent a router to "
    "another expert, most other sequences pass: try some with --seed or --tokens; what fails with "
    "all of them is an error"
)


@dataclass(frozen=True)
class Comparison:
    """Logits against a reference, position by position.

    `difference` f32[T]: largest |dlogit|; `kl` f64[T]: of the reference to the logits, in nats;
    `agree` bool[T]: whether both have the same top-1 token; `standard_deviation` of the reference.
    """

    difference: np.ndarray
    kl: np.ndarray
    agree: np.ndarray
    standard_deviation: float

    @property
    def max_difference(self) -> float:
        return float(self.difference.max())

    @property
    def max_kl(self) -> float:
        return float(self.kl.max())

    @property
    def mean_kl(self) -> float:
        return float(self.kl.mean())

    @property
    def top1_agreement(self) -> float:
        return float(self.agree.mean())

    @property
    def first_divergence(self) -> int | None:
        """The first position whose top-1 token differs."""
        return None if self.agree.all() else int(np.argmin(self.agree))

    def __str__(self) -> str:
        first = self.first_divergence
        diverges = "none" if first is None else f"position {first}"
        return (
            f"max |dlogit| {self.max_difference:.3g} (std {self.standard_deviation:.3g}), "
            f"KL max {self.max_kl:.3g} mean {self.mean_kl:.3g}, "
            f"top-1 agreement {self.top1_agreement:.2%}, first top-1 divergence: {diverges}"
        )


def compare(logits: np.ndarray, reference: np.ndarray) -> Comparison:
    """Both f32[T, V]."""
    ours, theirs = (_log_softmax(array.astype(np.float64)) for array in (logits, reference))
    return Comparison(
        difference=np.abs(logits - reference).max(-1),
        kl=(np.exp(theirs) * (theirs - ours)).sum(-1),
        agree=logits.argmax(-1) == reference.argmax(-1),
        standard_deviation=float(reference.std()),
    )


@dataclass(frozen=True)
class Verification:
    """The error of the arithmetic, and apart from it those of quantising activations and weights.

    `arithmetic`: the artifact against onnxruntime on the same numbers; `activations`: those against
    float activations; `weights`: dequantised weights against the original ones. `unsettled`
    bool[T]: where onnxruntime does not agree with itself (see `unsettled`), if that was asked.
    """

    recipe: str
    arithmetic: Comparison
    activations: Comparison
    weights: Comparison
    unsettled: np.ndarray | None = None

    @property
    def bound(self) -> float:
        """Of the arithmetic at a position: its |dlogit| with f32, else its KL."""
        if self.recipe == "f32":
            return MAX_DIFFERENCE * self.arithmetic.standard_deviation
        return max(MAX_KL, self.activations.max_kl)

    @property
    def out_of_bounds(self) -> np.ndarray:
        """bool[T]: where the arithmetic is, unsettled or not.

        With rounded activations, the order of additions can decide which way a number is rounded,
        and that which expert is chosen. So positions may differ by MAX_KL or as much as rounding
        does at its worst. (A router's exact tie may fall either way with any recipe.)
        """
        arithmetic = self.arithmetic
        found = arithmetic.difference if self.recipe == "f32" else arithmetic.kl
        return np.asarray(~(found <= self.bound))  # so not a number

    @property
    def excused(self) -> np.ndarray:
        """bool[T]: out of bounds, but no proof of anything, because unsettled. What is no number is
        never right."""
        unsettled = np.zeros(1, bool) if self.unsettled is None else self.unsettled
        return np.asarray(self.out_of_bounds & unsettled & np.isfinite(self.arithmetic.difference))

    @property
    def first_out_of_bounds(self) -> int | None:
        """The first position that is, and not excused."""
        wrong = self.out_of_bounds & ~self.excused
        return int(np.argmax(wrong)) if wrong.any() else None


def verify(
    artifact: Path, converted: Path, tokens: Sequence[int] | None = None, seed: int = 0
) -> Verification:
    """Compare the artifact's logits after each token with those of onnxruntime.

    `tokens` default to a random prompt, the same for each `seed`. Raises EmberdError when a file of
    the artifact is damaged, or when the two do not belong together.
    """
    model = ConvertedModel.load(converted)
    opened = Artifact.open(artifact)
    opened.verify_weights()
    dimensions = model.dimensions
    if (opened.model.vocab_size, opened.model.hidden_size, opened.model.layers) != (
        dimensions.vocab_size,
        dimensions.hidden_size,
        dimensions.layers,
    ):
        raise EmberdError(f"{artifact} was not built from {converted}: their dimensions differ")
    recipe = RECIPES[opened.model.recipe]
    if tokens is None:
        generator = np.random.default_rng(seed)
        tokens = generator.integers(0, dimensions.vocab_size, DEFAULT_TOKENS).tolist()
    original = Oracle(model).session().step(tokens)
    stored = Oracle(model, lambda instance, name: dequantised(model, recipe, instance, name))
    weights = stored.session().step(tokens)
    oracle = quantised_oracle(model, recipe)
    rounded = oracle.session().step(tokens)
    found = Verification(
        recipe=recipe.name,
        arithmetic=compare(core_logits(artifact, list(tokens)), rounded),
        activations=compare(rounded, weights),
        weights=compare(weights, original),
    )
    if not found.out_of_bounds.any():
        return found
    return replace(found, unsettled=unsettled(oracle.session(), tokens, rounded))


def unsettled(session: OracleSession, tokens: Sequence[int], logits: np.ndarray) -> np.ndarray:
    """bool[T]: where the oracle's own `logits` f32[T, V] for tokens that follow on `session` move
    by more than MAX_KL when embeddings change as little as NUDGES.

    There a number lies on the edge between two roundings, or a router meets a tie, and onnxruntime
    is as right as an artifact that decides otherwise. Chance may leave one of them unfound.
    """
    found = np.zeros(len(tokens), bool)
    generator = np.random.default_rng(0)
    for size in NUDGES:

        def nudge(embeddings: np.ndarray, size: float = size) -> np.ndarray:
            change = size * generator.uniform(-1, 1, embeddings.shape)
            return (embeddings * (1 + change)).astype(np.float32)

        found |= compare(session.fork().step(tokens, nudge), logits).kl > MAX_KL
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--against", type=Path, required=True, help="the converted model")
    parser.add_argument(
        "--tokens",
        type=Path,
        metavar="FILE",
        help="file with a JSON list of token ids (default: random ones)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of random ones (default %(default)s)")


def run(arguments: argparse.Namespace) -> None:
    tokens = None if arguments.tokens is None else read_tokens(arguments.tokens)
    if arguments.seed < 0:
        raise EmberdError(f"--seed {arguments.seed}: expected 0 or more")
    found = verify(arguments.artifact, arguments.against, tokens, arguments.seed)
    print(f"arithmetic, against onnxruntime on the same numbers: {found.arithmetic}")
    if found.recipe != "f32":
        print(f"rounded activations, against float ones: {found.activations}")
        print(f"quantised weights, against the original ones: {found.weights}")
    if excused := int(found.excused.sum()):
        print(
            f"not judged: {excused} of {len(found.excused)} positions out of bounds, where "
            "onnxruntime differs from itself too when embeddings change by a millionth or ten: a "
            "number lies on the edge between two roundings, or a router meets a tie"
        )
    position = found.first_out_of_bounds
    if position is not None:
        hint = "" if found.recipe == "f32" else _HINT
        raise EmberdError(
            f"{arguments.artifact} differs from {arguments.against}: the first position out of "
            f"bounds is {position} (|dlogit| {found.arithmetic.difference[position]:.3g}, "
            f"KL {found.arithmetic.kl[position]:.3g}){hint}"
        )
    if found.excused.all():
        raise EmberdError(
            f"{arguments.artifact}: no position is within bounds, and onnxruntime settles none: "
            "try other sequences with --seed or --tokens"
        )
    print(_verdict(found, "random tokens" if tokens is None else "the tokens given"))


def _verdict(found: Verification, tokens: str) -> str:
    positions = f"at {int((~found.excused).sum())} of {len(found.excused)} positions"
    if found.recipe == "f32":
        return (
            f"within bounds: |dlogit| of the arithmetic is at most {found.bound:.3g} "
            f"({MAX_DIFFERENCE:g} of std) {positions}"
        )
    return (
        f"within bounds: KL of the arithmetic is at most {found.bound:.3g} (the larger of "
        f"{MAX_KL:g} and the most that rounded activations make) {positions}; what quantised "
        f"weights change has no bound: here it is of {tokens}"
    )


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    result: np.ndarray = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result
