"""The checkpoint that is measured: random weights in the true shapes of a layer of
Qwen3.6-35B-A3B, a fifth of its depth.

Eight layers of 64 experts each, of which eight answer, and a fifth of the vocabulary: a decoded
token reads a fifth of what it reads of the real model. 2.1 billion parameters, 4.2 GB in bfloat16.
Random weights choose their experts evenly, which is the worst case for every cache.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from checkpoints import TinyModel, configuration, draw
from numpy.typing import NDArray

from bench import tokenizer

FIFTH = TinyModel(
    "fifth",
    layers="DDDADDDA",
    hidden=2048,
    vocab=248320 // 5,
    query_heads=16,
    kv_heads=2,
    head_dim=256,
    key_heads=16,
    value_heads=32,
    key_dim=128,
    value_dim=128,
    experts=64,
    top_k=8,
    intermediate=512,
    shared=512,
    dtype="BF16",
    max_context=262144,
)

WHOLE = replace(FIFTH, name="whole", layers=FIFTH.layers * 5, vocab=248320, experts=256)
"""The real model's dimensions: 35 billion parameters."""

_PART = 1 << 22  # values drawn at a time, each part from a generator of its own

Values = NDArray[np.uint16]
Floats = NDArray[np.float32]
Planted = Callable[[int, int], Floats]
"""(start, count) -> what is added to so many values of a tensor, from `start` on."""


@dataclass(frozen=True)
class _Tensor:
    name: str
    shape: tuple[int, ...]
    sample: Callable[[np.random.Generator, int], Floats]
    planted: Planted | None = None

    def part(self, index: int) -> Values:
        """The bfloat16 bits of the values from index * _PART on."""
        seed = zlib.crc32(f"{self.name}/{index}".encode())
        count = min(_PART, math.prod(self.shape) - index * _PART)
        values = self.sample(np.random.Generator(np.random.SFC64(seed)), count)
        if self.planted is not None:
            values += self.planted(index * _PART, count)
        bits = values.view(np.uint32)
        bits += 0x8000
        return (bits >> 16).astype(np.uint16)


class _Tensors:
    """Collects what `draw` asks for without drawing it, with what is planted in it."""

    def __init__(self, planted: Mapping[str, Planted]) -> None:
        self.tensors: list[_Tensor] = []
        self._planted = planted

    def normal(self, name: str, shape: tuple[int, ...], std: float, mean: float = 0.0) -> None:
        def sample(generator: np.random.Generator, count: int) -> Floats:
            values = generator.standard_normal(count, np.float32)
            values *= np.float32(std)
            values += np.float32(mean)
            return values

        self.tensors.append(_Tensor(name, shape, sample, self._planted.get(name)))

    def uniform(self, name: str, shape: tuple[int, ...], low: float, high: float) -> None:
        def sample(generator: np.random.Generator, count: int) -> Floats:
            return generator.uniform(low, high, count).astype(np.float32)

        self.tensors.append(_Tensor(name, shape, sample))


def write(folder: Path, model: TinyModel, planted: Mapping[str, Planted] | None = None) -> None:
    """Write the checkpoint; equal bytes every time. Holds a few parts of a tensor at a time.

    `planted`: by name of a normally distributed tensor, what is added to it.
    """
    collected = _Tensors(planted or {})
    draw(model, collected)
    partial = folder / "model.safetensors.partial"
    _write_headers(folder, model, collected.tensors, partial)
    with partial.open("ab") as file:
        for values in _drawn(collected.tensors):
            file.write(values.data)
    partial.rename(folder / "model.safetensors")


def write_structure(folder: Path, model: TinyModel) -> None:
    """Write the checkpoint with zeros for weights, as a hole that takes no place on the disk."""
    collected = _Tensors({})
    draw(model, collected)
    path = folder / "model.safetensors"
    end = _write_headers(folder, model, collected.tensors, path)
    with path.open("ab") as file:
        file.truncate(file.tell() + end)


def _write_headers(
    folder: Path, model: TinyModel, tensors: Sequence[_Tensor], weights: Path
) -> int:
    """All of a checkpoint but the bytes of its weights; returns how many those are."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.dumps(configuration(model), indent=1)
    (folder / "config.json").write_text(config, encoding="utf-8")
    header, end = {}, 0
    for tensor in tensors:
        start, end = end, end + 2 * math.prod(tensor.shape)
        header[tensor.name] = {
            "dtype": "BF16",
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    weights.write_bytes(len(text).to_bytes(8, "little") + text)
    return end


def write_fifth(folder: Path) -> None:
    """Writes FIFTH with a tokenizer, so that it can be served."""
    write(folder, FIFTH)
    tokenizer.write(folder, FIFTH.vocab)


def _drawn(tensors: list[_Tensor]) -> Iterator[Values]:
    """All values in order, drawn on all cores."""
    workers = os.cpu_count() or 1
    with ThreadPoolExecutor(workers) as pool:
        for tensor in tensors:
            parts = range(-(-math.prod(tensor.shape) // _PART))
            for first in range(0, len(parts), 2 * workers):
                yield from pool.map(tensor.part, parts[first : first + 2 * workers])
