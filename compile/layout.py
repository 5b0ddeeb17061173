"""Where everything lies in an artifact: known from shapes alone, before a weight is read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from emberd.compile.converted import BlockInstance, ConvertedModel
from emberd.compile.pipeline import CompiledBlocks
from emberd.compile.program import ProgramBuilder, weight_key
from emberd.compile.quantize.formats import FORMATS, expert_bytes
from emberd.compile.quantize.recipes import Recipe
from emberd.compile.residency.order import bank_indices, expert_order
from emberd.daemon.activation_map import ActivationMap, Expert
from emberd.daemon.program import Program

PAGE = 4096
ALIGNMENT = 64


@dataclass(frozen=True)
class Placed:
    """A weight as weights.bin holds it."""

    key: str
    instance: BlockInstance
    name: str
    offset: int
    format: str


@dataclass(frozen=True)
class Layout:
    """`placed`, then `constants` at `constant_offsets` (ascending), are weights.bin; `order` is
    that of experts.bin, `expert_bytes` each."""

    program: Program
    placed: Sequence[Placed]
    constants: Mapping[str, np.ndarray]
    constant_offsets: Mapping[str, int]
    weights_bytes: int
    order: Sequence[Expert]
    expert_bytes: int


def lay_out(
    model: ConvertedModel,
    recipe: Recipe,
    compiled: CompiledBlocks,
    activation_map: ActivationMap | None = None,
) -> Layout:
    """The layout of the artifact of `model`; `activation_map` decides the order of the experts."""
    constants = {
        key: array for block in compiled.programs.values() for key, array in block.constants.items()
    }
    placed = _place_weights(model, recipe)
    constant_offsets = _place_constants(constants, placed)
    end = max(
        [item.offset + _stored_bytes(item) for item in placed]
        + [offset + aligned(constants[key].nbytes) for key, offset in constant_offsets.items()]
    )
    dimensions = model.dimensions
    layers = [i for i, instance in enumerate(model.stack) if instance.block == "moe"]
    order = expert_order(dimensions.layers, dimensions.moe.experts, activation_map)
    builder = ProgramBuilder(
        model,
        weight_offsets={item.key: item.offset for item in placed} | constant_offsets,
        bank_indices=dict(zip(layers, bank_indices(order, dimensions.layers), strict=True)),
    )
    return Layout(
        program=builder.build(
            compiled.programs,
            compiled.chunks,
            compiled.kernels.of_one_token,
            compiled.kernels.in_waves,
        ),
        placed=placed,
        constants=constants,
        constant_offsets=constant_offsets,
        weights_bytes=-(-end // PAGE) * PAGE,
        order=order,
        expert_bytes=expert_bytes(
            FORMATS[recipe.format_of("moe", "experts_down")],
            dimensions.hidden_size,
            dimensions.moe.intermediate_size,
        ),
    )


def _place_weights(model: ConvertedModel, recipe: Recipe) -> list[Placed]:
    """Offsets in weights.bin; a weight that is used twice (tied embeddings) is stored once."""
    placed: list[Placed] = []
    known: dict[Any, int] = {}
    offset = 0
    for instance in model.stack:
        for name, reference in instance.weights.items():
            if name in ("experts_gate_up", "experts_down"):
                continue
            packing = recipe.format_of(instance.block, name)
            identity = (reference.pieces, packing)
            if identity not in known:
                known[identity] = offset
                offset += aligned(_packed_bytes(packing, reference.shape))
            key = weight_key(instance, name)
            placed.append(Placed(key, instance, name, known[identity], packing))
    return placed


def _place_constants(constants: dict[str, np.ndarray], placed: list[Placed]) -> dict[str, int]:
    last = max(placed, key=lambda item: item.offset)
    end = last.offset + _stored_bytes(last)
    offsets = {}
    for key in sorted(constants):
        offsets[key] = end
        end += aligned(constants[key].nbytes)
    return offsets


def _stored_bytes(item: Placed) -> int:
    shape = item.instance.weights[item.name].shape
    return aligned(_packed_bytes(item.format, shape))


def _packed_bytes(packing: str, shape: tuple[int, ...]) -> int:
    columns = math.prod(shape[1:])
    return FORMATS[packing].packed_bytes(shape[0], columns)


def aligned(size: int) -> int:
    """The next offset at which a tensor may begin."""
    return -(-size // ALIGNMENT) * ALIGNMENT
