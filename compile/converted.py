"""The converted model: a folder of ONNX blocks and the model.yaml that stacks them.

Weights stay in the checkpoint's own shards; model.yaml says which bytes of which file are which
weight. Everything that a file claims is checked here, before anyone computes with it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from emberd.compile.blocks import BLOCKS
from emberd.compile.dimensions import (
    AttentionDimensions,
    Dimensions,
    GatedDeltaDimensions,
    MoeDimensions,
)
from emberd.compile.document import Node, read_yaml
from emberd.compile.weights import DTYPES, Piece, Shard, WeightReader, WeightReference
from emberd.daemon.errors import EmberdError
from emberd.daemon.manifest import MANIFEST

FORMAT = "emberd-converted"
VERSION = 1
MODEL_FILE = "model.yaml"
BLOCK_FOLDER = "blocks"
MIXERS = ("gated_delta", "gated_attention")


@dataclass(frozen=True)
class BlockInstance:
    """One block of the stack; `layer` is None for embed and head."""

    block: str
    layer: int | None
    weights: dict[str, WeightReference]


@dataclass(frozen=True)
class ConvertedModel:
    """A converted model that has been checked as a whole: files exist, sizes and bounds hold."""

    folder: Path
    name: str
    architecture: str
    dimensions: Dimensions
    tied_embeddings: bool
    stop_tokens: tuple[int, ...]
    shards: dict[str, Shard]
    stack: list[BlockInstance]
    reader: WeightReader

    @classmethod
    def load(cls, folder: Path | str) -> ConvertedModel:
        """Read and check `folder`; EmberdError names the file, the place and what is wrong."""
        folder = Path(folder)
        file = folder / MODEL_FILE
        if not file.is_file():
            instead = kind_of(folder) or "run emberc convert"
            raise EmberdError(f"{folder}: not a converted model (no {MODEL_FILE}); {instead}")
        root = read_yaml(file)
        if root["format"].value != FORMAT:
            root["format"].fail(f"'{FORMAT}'")
        if root["version"].value != VERSION:
            root["version"].fail(f"version {VERSION}, the one this emberc reads; convert again")
        dimensions = _dimensions(root["dimensions"])
        shards = {key: _shard(folder, node) for key, node in root["shards"].mapping().items()}
        stack = [_instance(node, dimensions, shards) for node in root["stack"].sequence()]
        _check_stack(root["stack"], stack, dimensions)
        last = dimensions.vocab_size - 1
        stop_tokens = tuple(node.integer(0, last) for node in root["stop_tokens"].sequence())
        model = cls(
            folder=folder,
            name=root["name"].text(),
            architecture=root["architecture"].text(),
            dimensions=dimensions,
            tied_embeddings=root["tied_embeddings"].boolean(),
            stop_tokens=stop_tokens,
            shards=shards,
            stack=stack,
            reader=WeightReader(shards),
        )
        for block in {instance.block for instance in stack}:
            if not model.block_file(block).is_file():
                raise EmberdError(f"{model.block_file(block)}: missing; convert the model again")
        return model

    def block_file(self, block: str) -> Path:
        return self.folder / BLOCK_FOLDER / f"{block}.onnx"

    def block_model(self, block: str) -> onnx.ModelProto:
        """The ONNX graph of block kind `block`, checked; EmberdError when it is damaged."""
        file = self.block_file(block)
        try:
            model = onnx.load_model_from_string(file.read_bytes())
            onnx.checker.check_model(model)
        except OSError as error:
            raise EmberdError(f"{file}: cannot be read: {error.strerror}") from error
        except Exception as error:  # protobuf and the checker raise types of their own
            raise EmberdError(f"{file}: not a valid ONNX model: {error}") from error
        return model

    def read_weight(
        self, reference: WeightReference, rows: slice | None = None, index: int | None = None
    ) -> np.ndarray:
        """The weight as float32 in its shape: whole, a slice of its rows, or one `index` of axis 0.

        Only the bytes of that part are read.
        """
        if rows is not None and index is not None:
            raise ValueError("give rows or index, not both")
        inner = reference.shape[1:]
        width = math.prod(inner)
        if index is not None:
            return self.reader.read(reference, index * width, width).reshape(inner)
        start, stop, step = (rows or slice(None)).indices(reference.shape[0])
        if step != 1:
            raise ValueError("rows are read in steps of 1")
        count = max(stop - start, 0)
        return self.reader.read(reference, start * width, count * width).reshape(count, *inner)

    def read_expert(self, reference: WeightReference, expert: int) -> np.ndarray:
        """One expert's matrix f32[rows, columns] out of a bank [experts, rows, columns]."""
        return self.read_weight(reference, index=expert)


def kind_of(folder: Path) -> str:
    """What a folder is that emberc wrote, and what takes it; empty for any other."""
    if (folder / MANIFEST).is_file():
        return (
            "it is an artifact, already compiled: emberd check and serve take it, and emberc "
            "bench, profile, run, stalls and verify"
        )
    if (folder / MODEL_FILE).is_file():
        return "it is a converted model: emberc build, plan, run and verify --against take it"
    return ""


def _dimensions(node: Node) -> Dimensions:
    moe = node["moe"]
    attention, delta = node.get("attention"), node.get("gated_delta")
    experts = moe["experts"].integer(1)
    return Dimensions(
        hidden_size=node["hidden_size"].integer(1),
        vocab_size=node["vocab_size"].integer(1),
        layers=node["layers"].integer(1),
        eps=node["eps"].number(above=0),
        max_context=node["max_context"].integer(1),
        moe=MoeDimensions(
            experts=experts,
            top_k=moe["top_k"].integer(1, experts),
            intermediate_size=moe["intermediate_size"].integer(1),
            shared_intermediate_size=moe["shared_intermediate_size"].integer(1),
        ),
        attention=None if attention is None else _attention(attention),
        gated_delta=None if delta is None else _gated_delta(delta),
    )


def _attention(node: Node) -> AttentionDimensions:
    attention = AttentionDimensions(
        query_heads=node["query_heads"].integer(1),
        kv_heads=node["kv_heads"].integer(1),
        head_dim=node["head_dim"].integer(1),
        rotary_dim=node["rotary_dim"].integer(2, node["head_dim"].integer(2)),
        rope_theta=node["rope_theta"].number(above=0),
    )
    if attention.query_heads % attention.kv_heads:
        node["query_heads"].fail(f"a multiple of kv_heads ({attention.kv_heads})")
    if attention.rotary_dim % 2:
        node["rotary_dim"].fail("an even number")
    return attention


def _gated_delta(node: Node) -> GatedDeltaDimensions:
    delta = GatedDeltaDimensions(
        key_heads=node["key_heads"].integer(1),
        value_heads=node["value_heads"].integer(1),
        key_dim=node["key_dim"].integer(1),
        value_dim=node["value_dim"].integer(1),
        conv_kernel=node["conv_kernel"].integer(2),
    )
    if delta.value_heads % delta.key_heads:
        node["value_heads"].fail(f"a multiple of key_heads ({delta.key_heads})")
    return delta


def _shard(folder: Path, node: Node) -> Shard:
    shard = Shard(folder / node["path"].text(), node["bytes"].integer(1))
    try:
        size = shard.path.stat().st_size
    except OSError as error:
        raise EmberdError(
            f"{shard.path}: weights named by {node.file} cannot be opened: {error.strerror}; "
            "the checkpoint must stay where it was when it was converted"
        ) from error
    if size != shard.bytes:
        raise EmberdError(
            f"{shard.path}: expected {shard.bytes} bytes as when it was converted, found {size}; "
            "restore the file or convert again"
        )
    return shard


def _instance(node: Node, dimensions: Dimensions, shards: dict[str, Shard]) -> BlockInstance:
    block, layer = node["block"].text(), node.get("layer")
    if block not in BLOCKS:
        node["block"].fail(f"one of {', '.join(BLOCKS)}")
    if (block == "gated_delta" and dimensions.gated_delta is None) or (
        block == "gated_attention" and dimensions.attention is None
    ):
        node["block"].fail("a block whose dimensions are given")
    shapes = BLOCKS[block].weight_shapes(dimensions)
    weights = node["weights"].mapping()
    if set(weights) != set(shapes):
        node["weights"].fail(f"exactly the weights {', '.join(shapes)}")
    return BlockInstance(
        block,
        None if layer is None else layer.integer(0, dimensions.layers - 1),
        {name: _reference(weights[name], shape, shards) for name, shape in shapes.items()},
    )


def _reference(node: Node, shape: tuple[int, ...], shards: dict[str, Shard]) -> WeightReference:
    dtype = node["dtype"].text()
    if dtype not in DTYPES:
        node["dtype"].fail(f"one of {', '.join(DTYPES)}")
    if tuple(size.integer(1) for size in node["shape"].sequence()) != shape:
        node["shape"].fail(f"the shape {list(shape)}")
    listed = node.get("pieces")
    pieces = [_piece(node)] if listed is None else [_piece(item) for item in listed.sequence()]
    reference = WeightReference(node["name"].text(), dtype, shape, tuple(pieces))
    if not pieces or reference.elements % len(pieces):
        node.fail("a number of pieces that divides the weight evenly")
    for piece in pieces:
        if piece.shard not in shards:
            node.fail(f"a shard that is listed (not '{piece.shard}')")
        if piece.offset + reference.piece_bytes > shards[piece.shard].bytes:
            raise EmberdError(
                f"{node.file}: {node.place}: tensor {reference.name} ends at byte "
                f"{piece.offset + reference.piece_bytes} of {shards[piece.shard].path}, "
                f"which has {shards[piece.shard].bytes}"
            )
    return reference


def _piece(node: Node) -> Piece:
    return Piece(node["shard"].text(), node["offset"].integer(0))


def _check_stack(node: Node, stack: list[BlockInstance], dimensions: Dimensions) -> None:
    """The stack is embed, then a mixer and an MoE for every layer in order, then head."""
    found = [(instance.block, instance.layer) for instance in stack]
    mixers = [(block, layer) for block, layer in found if block in MIXERS]
    expected: list[tuple[str, int | None]] = [("embed", None)]
    for layer in range(dimensions.layers):
        mixer = mixers[layer][0] if layer < len(mixers) else "gated_delta"
        expected += [(mixer, layer), ("moe", layer)]
    expected.append(("head", None))
    if found != expected:
        wrong = next(
            (i for i, pair in enumerate(zip(found, expected, strict=False)) if pair[0] != pair[1]),
            min(len(found), len(expected)),
        )
        raise EmberdError(
            f"{node.file}: stack[{wrong}]: the stack must be embed, then a mixer and moe for each "
            f"of the {dimensions.layers} layers in order, then head"
        )
