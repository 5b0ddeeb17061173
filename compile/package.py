"""Writes the artifact: weights packed by recipe, program, kernel libraries, text files."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from emberd.compile.converted import ConvertedModel
from emberd.compile.isa.isa import Isa
from emberd.compile.layout import Layout, Placed, aligned, lay_out
from emberd.compile.link import build_library
from emberd.compile.parallel import in_order
from emberd.compile.pipeline import CompiledBlocks
from emberd.compile.predict.compiled import build_predictor
from emberd.compile.predict.network import TrainedNetwork
from emberd.compile.quantize.formats import FORMATS, Bytes, pack_expert
from emberd.compile.quantize.recipes import Recipe
from emberd.compile.residency.trace import TraceHeader
from emberd.daemon.activation_map import MAP_FILE, ActivationMap, Expert
from emberd.daemon.artifact import EXPERTS, WEIGHTS
from emberd.daemon.artifact_writer import ArtifactWriter, HashingFile
from emberd.daemon.errors import EmberdError
from emberd.daemon.manifest import ModelDescription
from emberd.targets.registry import Target

_ROWS_AT_ONCE = 4096  # of a matrix while it is packed: bounds memory


def write_artifact(
    destination: Path,
    model: ConvertedModel,
    recipe: Recipe,
    target: Target,
    isas: list[Isa],
    compiled: CompiledBlocks,
    texts: Mapping[str, bytes],
    progress: Callable[[str], None] = lambda _label: None,
    activation_map: ActivationMap | None = None,
    predictor: TrainedNetwork | None = None,
) -> None:
    """Write the artifact of `model` at `destination`, complete or not at all.

    `texts` are its text files by name; `activation_map` decides the order of experts.bin, and goes
    into the artifact; so does the `predictor`, compiled.

    Raises EmberdError when a weight cannot be packed or a file cannot be written, and when the
    map or the predictor turns out to be of another model.
    """
    layout = lay_out(model, recipe, compiled, activation_map)
    dimensions = model.dimensions
    description = ModelDescription(
        name=model.name,
        architecture=model.architecture,
        vocab_size=dimensions.vocab_size,
        hidden_size=dimensions.hidden_size,
        layers=dimensions.layers,
        max_context=dimensions.max_context,
        stop_tokens=model.stop_tokens,
        recipe=recipe.name,
        details=_details(model, layout),
    )
    with ArtifactWriter(
        destination, description, target=target.name, expert_policy=target.expert_policy
    ) as writer:
        writer.write_program(layout.program)
        for isa in isas:
            progress(f"kernels for {isa.name}")
            writer.add_kernels(isa.name, isa.cpu_features, build_library(compiled.kernels, isa))
        with writer.open_file(WEIGHTS) as file:
            weights = _write_weights(file, model, layout, progress)
        with writer.open_file(EXPERTS) as file:
            blobs = _write_experts(file, model, recipe, layout.order, progress)
        identity = _identity(model, weights, blobs)
        writer.set_identity(identity)
        if activation_map is not None:
            activation_map.check_model(identity)
            writer.write_file(MAP_FILE, activation_map.to_bytes())
        if predictor is not None:
            predictor.check_model(identity)
            progress("predictor")
            header = _traced(model, layout, identity)
            graph = predictor.graph
            writer.add_predictor(
                lambda path: build_predictor(graph, header, path, isas, target.name)
            )
        for name, data in texts.items():
            writer.write_file(name, data)


def _traced(model: ConvertedModel, layout: Layout, identity: str) -> TraceHeader:
    """What traces of the model say of it."""
    layers, moe = model.dimensions.layers, model.dimensions.moe
    return TraceHeader(identity, layers, moe.experts, moe.top_k, layout.expert_bytes)


def _details(model: ConvertedModel, layout: Layout) -> dict[str, Any]:
    moe = model.dimensions.moe
    return {
        "experts": moe.experts,
        "experts_per_token": moe.top_k,
        "expert_bytes": layout.expert_bytes,
        "parameters": sum(
            math.prod(reference.shape)
            for instance in model.stack
            for name, reference in instance.weights.items()
            if not (model.tied_embeddings and name == "lm_head")
        ),
    }


def _write_weights(
    file: HashingFile,
    model: ConvertedModel,
    layout: Layout,
    progress: Callable[[str], None],
) -> str:
    """Returns the hash of the weights, constants of kernels excluded."""
    for item in layout.placed:
        if item.offset < file.size:
            continue  # stored already: tied
        progress(item.key)
        for packed in _packed(model, item):
            file.write(packed.data)
        file.write(bytes(aligned(file.size) - file.size))
    digest = file.hexdigest()
    for key, offset in layout.constant_offsets.items():
        assert file.size == offset
        file.write(np.ascontiguousarray(layout.constants[key]).data)
        file.write(bytes(aligned(file.size) - file.size))
    file.write(bytes(layout.weights_bytes - file.size))
    return digest


def _packed(model: ConvertedModel, item: Placed) -> Iterator[Bytes]:
    """The bytes of a weight, block of rows after block of rows."""
    reference = item.instance.weights[item.name]

    def pack(rows: slice) -> Bytes:
        values = model.read_weight(reference, rows=rows)
        with _naming(reference.name):
            return FORMATS[item.format].pack(values.reshape(len(values), -1))

    return in_order(pack, _row_blocks(reference.shape))


def _write_experts(
    file: HashingFile,
    model: ConvertedModel,
    recipe: Recipe,
    order: Sequence[Expert],
    progress: Callable[[str], None],
) -> dict[Expert, str]:
    """Returns the hash of each expert's blob."""
    packing = FORMATS[recipe.format_of("moe", "experts_down")]
    instances = {instance.layer: instance for instance in model.stack if instance.block == "moe"}

    def pack(place: Expert) -> tuple[Bytes, str]:
        layer, expert = place
        weights = instances[layer].weights
        gate_up, down = weights["experts_gate_up"], weights["experts_down"]
        matrices = model.read_expert(gate_up, expert), model.read_expert(down, expert)
        with _naming(f"{gate_up.name} or {down.name}, expert {expert}"):
            packed = pack_expert(packing, *matrices)
        return packed, hashlib.blake2b(packed.data, digest_size=32).hexdigest()

    digests = {}
    for (layer, expert), (packed, digest) in zip(order, in_order(pack, order), strict=True):
        progress(f"expert {expert} of layer {layer}")
        file.write(packed.data)
        digests[layer, expert] = digest
    return digests


def _identity(model: ConvertedModel, weights: str, blobs: Mapping[Expert, str]) -> str:
    """What a model is, however its experts are ordered and its kernels are compiled."""
    parts = [model.architecture, asdict(model.dimensions.moe), weights, sorted(blobs.items())]
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=32).hexdigest()


@contextmanager
def _naming(weight: str) -> Iterator[None]:
    """Says in an EmberdError which weight it is about."""
    try:
        yield
    except EmberdError as error:
        raise EmberdError(f"{weight}: {error}") from error


def _row_blocks(shape: tuple[int, ...]) -> Iterator[slice]:
    for start in range(0, shape[0], _ROWS_AT_ONCE):
        yield slice(start, min(start + _ROWS_AT_ONCE, shape[0]))
