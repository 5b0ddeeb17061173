"""A checkpoint whose routers have habits: each class of tokens has experts of its own.

Token t is of class t % CLASSES. Its embedding has the direction of its class in it, and in every
layer so have the router weights of the class's `HOT` experts. The layers' outputs are small beside
the embeddings, so that the direction is still there in the last of them. The strengths were chosen
so that a class's hot experts carry about 0.8 of its routing weights, which the test measures.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from checkpoints import TinyModel
from numpy.typing import NDArray

from bench import checkpoint, tokenizer
from bench.checkpoint import FIFTH, Floats, Planted

CLASSES = 8
HOT = 16
SKEWED = replace(FIFTH, name="skewed", layers="DDDA", experts=256)

_TOKEN_STRENGTH = 8.0  # of what a token's embedding has beside its class
_CLASS_STRENGTH = 8.0  # of the direction of its class in it
_ROUTER_STRENGTH = 4.5  # of that direction in the router weights of the class's experts
_SEED = 20260101


@dataclass(frozen=True)
class Habits:
    """directions f32[CLASSES, hidden], of +1 and -1; hot [layers, CLASSES, HOT], expert ids."""

    directions: Floats
    hot: NDArray[np.int64]

    @staticmethod
    def of(model: TinyModel) -> Habits:
        """The same every time; `model` has at least CLASSES * HOT experts."""
        generator = np.random.default_rng(_SEED)
        directions = generator.choice(np.array([-1, 1], np.float32), (CLASSES, model.hidden))
        hot = [generator.permutation(model.experts)[: CLASSES * HOT] for _ in model.layers]
        return Habits(directions, np.stack(hot).reshape(len(model.layers), CLASSES, HOT))

    def embedding(self, start: int, count: int) -> Floats:
        """See Planted."""
        hidden = self.directions.shape[1]
        generator = np.random.Generator(np.random.SFC64(_SEED + start))
        values = generator.standard_normal(count, np.float32) * np.float32(_TOKEN_STRENGTH)
        positions = np.arange(start, start + count)
        classes = positions // hidden % CLASSES
        return values + np.float32(_CLASS_STRENGTH) * self.directions[classes, positions % hidden]

    def router(self, layer: int) -> Planted:
        """Of the router weights of a layer, f32[experts, hidden]."""
        hidden = self.directions.shape[1]
        strength = np.float32(_ROUTER_STRENGTH / hidden)
        directions = {
            expert: strength * direction
            for experts, direction in zip(self.hot[layer], self.directions, strict=True)
            for expert in experts
        }

        def planted(start: int, count: int) -> Floats:
            first, last = start // hidden, -(-(start + count) // hidden)
            rows = np.zeros((last - first, hidden), np.float32)
            for row in range(first, last):
                rows[row - first] = directions.get(row, 0.0)
            return rows.reshape(-1)[start - first * hidden :][:count]

        return planted


def write_skewed(folder: Path) -> None:
    """Writes SKEWED with a tokenizer, so that it can be served."""
    write(folder, SKEWED)
    tokenizer.write(folder, SKEWED.vocab)


def write(folder: Path, model: TinyModel) -> None:
    """Write the checkpoint; equal bytes every time."""
    habits = Habits.of(model)
    planted: dict[str, Planted] = {"model.embed_tokens.weight": habits.embedding}
    for layer in range(len(model.layers)):
        planted[f"model.layers.{layer}.mlp.gate.weight"] = habits.router(layer)
    checkpoint.write(folder, model, planted)
