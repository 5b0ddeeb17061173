"""The block kinds a model is stacked from, each an ONNX graph of its own.

Weights are graph inputs, so one graph serves every layer of its kind; T (the tokens of a step) and
P (the tokens cached) are symbolic; states are explicit inputs and outputs.
"""

from __future__ import annotations

from typing import Protocol

import onnx
from emberd.compile.blocks import embed, gated_attention, gated_delta, head, moe
from emberd.compile.dimensions import Dimensions


class BlockKind(Protocol):
    """What a block module offers."""

    def weight_shapes(self, dimensions: Dimensions) -> dict[str, tuple[int, ...]]:
        """The weights by canonical name, in the order of the graph's inputs."""

    def build(self, dimensions: Dimensions) -> onnx.ModelProto:
        """The checked ONNX model."""


BLOCKS: dict[str, BlockKind] = {
    "embed": embed,
    "gated_delta": gated_delta,
    "gated_attention": gated_attention,
    "moe": moe,
    "head": head,
}
