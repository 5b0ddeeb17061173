"""A Hugging Face checkpoint folder: its shards, and which tensor is which weight of which block."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from emberd.compile.blocks import BLOCKS
from emberd.compile.checkpoint.configuration import Configuration, read_configuration
from emberd.compile.checkpoint.safetensors import StoredTensor, read_header
from emberd.compile.converted import BlockInstance
from emberd.compile.document import read_json
from emberd.compile.weights import Piece, Shard, WeightReference
from emberd.daemon.errors import EmberdError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
GENERATION_CONFIG_FILE = "generation_config.json"
_PREFIXES = ("model.language_model.", "model.")
_DTYPES = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
_IGNORED = (
    (re.compile(r"(model\.)?visual\."), "vision tower", "emberd runs the language model alone"),
    (re.compile(r"(model\.)?mtp\."), "multi-token prediction", "it drafts tokens, it changes none"),
)
_MAX_LISTED = 5

# The tensor behind each weight, below the layer's prefix. Several names for one weight are parts
# that follow one another; `*` stands for every expert in turn.
_LAYER_NAMES: dict[str, dict[str, str]] = {
    "gated_delta": {
        "input_norm": "input_layernorm.weight",
        "in_proj_qkv": "linear_attn.in_proj_qkv.weight",
        "in_proj_z": "linear_attn.in_proj_z.weight",
        "in_proj_b": "linear_attn.in_proj_b.weight",
        "in_proj_a": "linear_attn.in_proj_a.weight",
        "conv": "linear_attn.conv1d.weight",
        "A_log": "linear_attn.A_log",
        "dt_bias": "linear_attn.dt_bias",
        "output_norm": "linear_attn.norm.weight",
        "out_proj": "linear_attn.out_proj.weight",
    },
    "gated_attention": {
        "input_norm": "input_layernorm.weight",
        "q_proj": "self_attn.q_proj.weight",
        "k_proj": "self_attn.k_proj.weight",
        "v_proj": "self_attn.v_proj.weight",
        "q_norm": "self_attn.q_norm.weight",
        "k_norm": "self_attn.k_norm.weight",
        "o_proj": "self_attn.o_proj.weight",
    },
    "moe": {
        "post_norm": "post_attention_layernorm.weight",
        "router": "mlp.gate.weight",
        "experts_gate_up": "mlp.experts.gate_up_proj",
        "experts_down": "mlp.experts.down_proj",
        "shared_gate_proj": "mlp.shared_expert.gate_proj.weight",
        "shared_up_proj": "mlp.shared_expert.up_proj.weight",
        "shared_down_proj": "mlp.shared_expert.down_proj.weight",
        "shared_expert_gate": "mlp.shared_expert_gate.weight",
    },
}
_EXPERT_NAMES = {
    "experts_gate_up": ("mlp.experts.{}.gate_proj.weight", "mlp.experts.{}.up_proj.weight"),
    "experts_down": ("mlp.experts.{}.down_proj.weight",),
}


@dataclass
class Mapped:
    """The stack as far as the checkpoint's tensors go, and everything that stands in its way."""

    stack: list[BlockInstance] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    used: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Ignored:
    """Tensors left out of the conversion, and why."""

    part: str
    reason: str
    tensors: int
    bytes: int


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint: configuration and headers, no weights.

    `tied` tells whether the head multiplies by the embedding: the configuration allows it and no
    head of its own is stored (transformers too prefers a stored head).
    """

    folder: Path
    configuration: Configuration
    shards: dict[str, Shard]
    tensors: dict[str, StoredTensor]

    @classmethod
    def open(cls, folder: Path | str) -> Checkpoint:
        """Read config.json and all shard headers. Raises EmberdError."""
        folder = Path(folder)
        if not folder.is_dir():
            raise EmberdError(f"{folder}: not a folder; expected a Hugging Face checkpoint folder")
        configuration = read_configuration(folder)
        tensors = _read_tensors(folder)
        files = sorted({tensor.file for tensor in tensors.values()})
        shards = {file.name: Shard(file, file.stat().st_size) for file in files}
        return cls(folder, configuration, shards, tensors)

    @property
    def tied(self) -> bool:
        return self.configuration.tied_embeddings and "lm_head.weight" not in self.tensors

    def ignored(self) -> list[Ignored]:
        """The parts of the checkpoint that are no part of the language model."""
        result = []
        for pattern, part, reason in _IGNORED:
            found = [tensor for name, tensor in self.tensors.items() if pattern.match(name)]
            if found:
                size = sum(tensor.bytes for tensor in found)
                result.append(Ignored(part, reason, len(found), size))
        return result

    def stack(self) -> list[BlockInstance]:
        """Every block with its weights; EmberdError when a tensor is missing, wrong or unknown."""
        mapped = self.map()
        if mapped.problems:
            listed = "; ".join(mapped.problems[:_MAX_LISTED])
            more = len(mapped.problems) - _MAX_LISTED
            raise EmberdError(
                f"{self.folder}: {listed}" + (f"; and {more} more like these" if more > 0 else "")
            )
        return mapped.stack

    def map(self) -> Mapped:
        """Find the tensor of every weight, collecting problems instead of raising."""
        mapper = _Mapper(self)
        prefix = next((p for p in _PREFIXES if p + "embed_tokens.weight" in self.tensors), None)
        if prefix is None:
            prefix = next(
                (p for p in _PREFIXES if any(name.startswith(p) for name in self.tensors)), "model."
            )
        embedding = prefix + "embed_tokens.weight"
        mapper.add("embed", None, {"embedding": embedding})
        for layer, mixer in enumerate(self.configuration.mixers):
            for block in (mixer, "moe"):
                below = f"{prefix}layers.{layer}."
                names = {weight: below + name for weight, name in _LAYER_NAMES[block].items()}
                mapper.add(block, layer, names, below)
        lm_head = embedding if self.tied else "lm_head.weight"
        mapper.add("head", None, {"final_norm": prefix + "norm.weight", "lm_head": lm_head})
        mapper.report_unknown()
        return mapper.mapped


class _Mapper:
    def __init__(self, checkpoint: Checkpoint) -> None:
        self._tensors: Mapping[str, StoredTensor] = checkpoint.tensors
        self._dimensions = checkpoint.configuration.dimensions
        self.mapped = Mapped()

    def add(self, block: str, layer: int | None, names: dict[str, str], below: str = "") -> None:
        """Append a block whose weights are the tensors `names`, if they are all there."""
        weights = {}
        for weight, shape in BLOCKS[block].weight_shapes(self._dimensions).items():
            parts = [names[weight]]
            if weight in _EXPERT_NAMES and names[weight] not in self._tensors:
                parts = [
                    below + pattern.format(expert)
                    for expert in range(shape[0])
                    for pattern in _EXPERT_NAMES[weight]
                ]
                if parts[0] not in self._tensors:  # name the bank, not each of its experts
                    parts = [names[weight]]
            reference = self._reference(names[weight], parts, shape)
            if reference is not None:
                weights[weight] = reference
        self.mapped.stack.append(BlockInstance(block, layer, weights))

    def report_unknown(self) -> None:
        for name, tensor in self._tensors.items():
            known = name in self.mapped.used or any(
                pattern.match(name) for pattern, _, _ in _IGNORED
            )
            if not known:
                self._problem(
                    f"unexpected tensor {name} {list(tensor.shape)} in {tensor.file.name}; "
                    "the configuration has no place for it"
                )

    def _reference(
        self, name: str, parts: list[str], shape: tuple[int, ...]
    ) -> WeightReference | None:
        part_shape = shape
        if len(parts) > 1:
            part_shape = (shape[0] * shape[1] // len(parts), *shape[2:])
        found = [self._find(part, part_shape) for part in parts]
        tensors = [tensor for tensor in found if tensor is not None]
        if len(tensors) < len(parts):
            return None
        dtypes = {tensor.dtype for tensor in tensors}
        if len(dtypes) > 1:
            self._problem(f"experts of {name} are stored in several dtypes: {sorted(dtypes)}")
            return None
        pieces = tuple(Piece(tensor.file.name, tensor.offset) for tensor in tensors)
        return WeightReference(name, _DTYPES[tensors[0].dtype], shape, pieces)

    def _find(self, name: str, shape: tuple[int, ...]) -> StoredTensor | None:
        tensor = self._tensors.get(name)
        if tensor is None:
            self.mapped.missing.append(name)
            self._problem(f"missing tensor {name} {list(shape)}")
            return None
        self.mapped.used.add(name)
        stored = tensor.shape
        if len(stored) == 3 and len(shape) == 2 and stored[1] == 1:
            stored = (stored[0], stored[2])  # a depthwise convolution has one input channel
        where = f"tensor {name} in {tensor.file.name}"
        if stored != shape:
            self._problem(f"{where}: expected shape {list(shape)}, found {list(tensor.shape)}")
            return None
        if tensor.dtype not in _DTYPES:
            self._problem(f"{where}: expected dtype {', '.join(_DTYPES)}, found {tensor.dtype}")
            return None
        return tensor

    def _problem(self, text: str) -> None:
        self.mapped.problems.append(text)


def _read_tensors(folder: Path) -> dict[str, StoredTensor]:
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    if single.is_file():
        return {tensor.name: tensor for tensor in read_header(single)}
    if index.is_file():
        return _read_sharded(folder, index)
    raise EmberdError(f"{folder}: neither {SINGLE_FILE} nor {INDEX_FILE}; emberc reads safetensors")


def _read_sharded(folder: Path, index: Path) -> dict[str, StoredTensor]:
    """The tensors of all shards, which must be those of the index and where it puts them."""
    weight_map = {
        name: node.text() for name, node in read_json(index)["weight_map"].mapping().items()
    }
    tensors: dict[str, StoredTensor] = {}
    for shard in sorted(set(weight_map.values())):
        if Path(shard).name != shard:
            raise EmberdError(f"{index}: '{shard}' is not the name of a file beside it")
        if not (folder / shard).is_file():
            raise EmberdError(f"{folder / shard}: missing shard; {INDEX_FILE} lists it")
        for tensor in read_header(folder / shard):
            if weight_map.get(tensor.name) != shard:
                listed = weight_map.get(tensor.name, "no shard")
                raise EmberdError(
                    f"{folder / shard}: holds tensor {tensor.name}, which {INDEX_FILE} "
                    f"places in {listed}"
                )
            tensors[tensor.name] = tensor
    for name, shard in weight_map.items():
        if name not in tensors:
            raise EmberdError(f"{folder / shard}: tensor {name} of {INDEX_FILE} is not in it")
    return tensors
