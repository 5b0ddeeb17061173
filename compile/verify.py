"""`emberc verify`: an artifact against the converted model it was built from, in onnxruntime."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from emberd.compile.converted import BlockInstance, ConvertedModel
from emberd.compile.oracle import Oracle
from emberd.compile.quantize.formats import FORMATS, pack_expert, unpack_expert
from emberd.compile.quantize.recipes import RECIPES, Recipe
from emberd.compile.run import core_logits, read_tokens
from emberd.daemon.artifact import Artifact
from emberd.daemon.errors import EmberdError

DEFAULT_TOKENS = 64


@dataclass(frozen=True)
class Comparison:
    """Logits against a reference, over positions; KL is of the reference to the logits, in nats."""

    max_difference: float
    standard_deviation: float
    max_kl: float
    mean_kl: float
    top1_agreement: float
    first_divergence: int | None

    def __str__(self) -> str:
        diverges = "none" if self.first_divergence is None else f"position {self.first_divergence}"
        return (
            f"max |dlogit| {self.max_difference:.3g} (std {self.standard_deviation:.3g}), "
            f"KL max {self.max_kl:.3g} mean {self.mean_kl:.3g}, "
            f"top-1 agreement {self.top1_agreement:.2%}, first top-1 divergence: {diverges}"
        )


def compare(logits: np.ndarray, reference: np.ndarray) -> Comparison:
    """Both f32[T, V]."""
    ours, theirs = (_log_softmax(array.astype(np.float64)) for array in (logits, reference))
    kl = (np.exp(theirs) * (theirs - ours)).sum(-1)
    agree = logits.argmax(-1) == reference.argmax(-1)
    return Comparison(
        max_difference=float(np.abs(logits - reference).max()),
        standard_deviation=float(reference.std()),
        max_kl=float(kl.max()),
        mean_kl=float(kl.mean()),
        top1_agreement=float(agree.mean()),
        first_divergence=None if agree.all() else int(np.argmin(agree)),
    )


def dequantised(
    model: ConvertedModel, recipe: Recipe, instance: BlockInstance, name: str
) -> np.ndarray:
    """A weight as the artifact's kernels see it: packed in its format and unpacked again."""
    reference = instance.weights[name]
    packing = FORMATS[recipe.format_of(instance.block, name)]
    if name in ("experts_gate_up", "experts_down"):
        halves = [_expert(model, recipe, instance, e) for e in range(reference.shape[0])]
        return np.stack([pair[name == "experts_down"] for pair in halves])
    weight = model.read_weight(reference)
    if packing.name == "f32" or weight.ndim != 2:
        return weight
    return packing.unpack(packing.pack(weight), *weight.shape)


def _expert(
    model: ConvertedModel, recipe: Recipe, instance: BlockInstance, expert: int
) -> tuple[np.ndarray, np.ndarray]:
    packing = FORMATS[recipe.format_of("moe", "experts_down")]
    gate_up = model.read_expert(instance.weights["experts_gate_up"], expert)
    down = model.read_expert(instance.weights["experts_down"], expert)
    return unpack_expert(packing, pack_expert(packing, gate_up, down), *down.shape)


def verify(
    artifact: Path, converted: Path, tokens: list[int] | None = None
) -> tuple[Comparison, Comparison]:
    """Compare the artifact with onnxruntime on its dequantised weights, and those with the
    original weights: the error of the arithmetic, and that of the quantisation apart.

    `tokens` default to a fixed random prompt. Raises EmberdError when the two do not belong
    together.
    """
    model = ConvertedModel.load(converted)
    opened = Artifact.open(artifact)
    dimensions = model.dimensions
    if (opened.model.vocab_size, opened.model.hidden_size, opened.model.layers) != (
        dimensions.vocab_size,
        dimensions.hidden_size,
        dimensions.layers,
    ):
        raise EmberdError(f"{artifact} was not built from {converted}: their dimensions differ")
    recipe = RECIPES[opened.model.recipe]
    if tokens is None:
        generator = np.random.default_rng(0)
        tokens = generator.integers(0, dimensions.vocab_size, DEFAULT_TOKENS).tolist()
    original = Oracle(model).session().step(tokens)
    quantised = (
        Oracle(model, lambda instance, name: dequantised(model, recipe, instance, name))
        .session()
        .step(tokens)
    )
    return compare(core_logits(artifact, tokens), quantised), compare(quantised, original)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--against", type=Path, required=True, help="the converted model")
    parser.add_argument("--tokens", type=Path, help="JSON list of token ids (default: random)")


def run(arguments: argparse.Namespace) -> None:
    tokens = None if arguments.tokens is None else read_tokens(arguments.tokens)
    arithmetic, quantisation = verify(arguments.artifact, arguments.against, tokens)
    print(f"artifact against its dequantised weights: {arithmetic}")
    print(f"dequantised against original weights:     {quantisation}")


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    result: np.ndarray = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result
