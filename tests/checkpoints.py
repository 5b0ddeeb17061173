"""Tiny random checkpoints of the true architecture, written without torch.

`MODELS` is the list that parity tests run over: every kind of layer stack and every dimension that
a kernel may get wrong. Weights are drawn so that no path is idle: norms, gates, routers and states
all matter, and logits have a standard deviation near one.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

Tensors = dict[str, np.ndarray]

_BITS = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}


@dataclass(frozen=True)
class TinyModel:
    """A configuration; `layers` has a D for a gated delta layer and an A for an attention layer.

    `prompt` is how many tokens the parity tests feed it.
    """

    name: str
    layers: str = "DDDA"
    hidden: int = 128
    vocab: int = 96
    query_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    rotary_factor: float = 0.25
    theta: float = 10_000_000.0
    key_heads: int = 2
    value_heads: int = 4
    key_dim: int = 32
    value_dim: int = 32
    conv: int = 4
    experts: int = 8
    top_k: int = 2
    intermediate: int = 64
    shared: int = 64
    tied: bool = False
    dtype: str = "F32"
    prompt: int = 70
    max_context: int = 4096

    @property
    def quantizable(self) -> bool:
        """Whether q8 and q4 can take it: every matrix has a multiple of 32 columns."""
        columns = [self.hidden, self.intermediate, self.shared]
        if "A" in self.layers:
            columns.append(self.query_heads * self.head_dim)
        if "D" in self.layers:
            columns.append(self.value_heads * self.value_dim)
        return all(size % 32 == 0 for size in columns)

    def tokens(self) -> np.ndarray:
        """i32[prompt]: the prompt of the parity tests."""
        return _generator(self.name, "prompt").integers(0, self.vocab, self.prompt, np.int32)

    def chunks(self) -> list[np.ndarray]:
        """The prompt cut into pieces of 1 to 64 tokens."""
        generator, tokens = _generator(self.name, "chunks"), self.tokens()
        cuts: list[int] = []
        while sum(cuts) < len(tokens):
            cuts.append(int(generator.choice([1, 1, 2, 7, 8, 31, 64])))
        return [chunk for chunk in np.split(tokens, np.cumsum(cuts)) if len(chunk)]

    def golden_rows(self) -> list[int]:
        """The positions whose logits are kept: around the 64 that transformers computes at once."""
        rows = (0, 1, 3, 62, 63, 64, self.prompt - 1)
        return sorted({row for row in rows if row < self.prompt})


MODELS = [
    TinyModel("standard"),
    TinyModel("long_prompt", layers="DA", prompt=700),
    TinyModel("one_token", prompt=1),
    TinyModel("nine_layers", layers="DDDADDDAD", hidden=64, prompt=40),
    TinyModel("one_delta_layer", layers="D", prompt=130),
    TinyModel("one_attention_layer", layers="A", prompt=130),
    TinyModel("delta_only", layers="DDD", prompt=65),
    TinyModel("attention_only", layers="AAA", prompt=64),
    TinyModel("attention_first", layers="ADAD"),
    TinyModel("one_of_two_experts", experts=2, top_k=1),
    TinyModel("all_of_two_experts", experts=2, top_k=2, prompt=33),
    TinyModel("eight_of_64_experts", layers="DA", experts=64, top_k=8),
    TinyModel("all_of_eight_experts", experts=8, top_k=8, layers="AD"),
    TinyModel("multi_head", query_heads=4, kv_heads=4, layers="AD"),
    TinyModel("multi_query", query_heads=8, kv_heads=1, head_dim=32, layers="DA"),
    TinyModel("true_head_sizes", layers="DA", hidden=256, head_dim=256, key_dim=128, value_dim=128),
    TinyModel("whole_head_rotates", layers="AA", rotary_factor=1.0, theta=10_000.0, prompt=150),
    TinyModel("value_heads_equal", key_heads=4, value_heads=4, layers="DDA"),
    TinyModel("value_heads_fourfold", key_heads=2, value_heads=8, layers="DDA"),
    TinyModel("values_wider_than_keys", key_dim=16, value_dim=64, layers="DD"),
    TinyModel("keys_wider_than_values", key_dim=64, value_dim=16, layers="DA"),
    TinyModel("convolution_2", conv=2, layers="DA"),
    TinyModel("convolution_3", conv=3, layers="DD"),
    TinyModel("convolution_7", conv=7, layers="DA", prompt=5),
    TinyModel("tied", tied=True),
    TinyModel("odd_vocabulary", vocab=251, layers="DA"),
    TinyModel("wide_shared_expert", shared=192, intermediate=32, layers="DA"),
    TinyModel("bfloat16", dtype="BF16"),
    TinyModel("float16", dtype="F16", layers="AD"),
    TinyModel("odd_hidden", hidden=40, intermediate=24, shared=20, layers="DA"),
    TinyModel(
        "odd_everything",
        layers="DAD",
        hidden=36,
        vocab=77,
        query_heads=3,
        kv_heads=1,
        head_dim=12,
        rotary_factor=0.5,
        key_heads=3,
        value_heads=6,
        key_dim=6,
        value_dim=10,
        conv=5,
        experts=5,
        top_k=3,
        intermediate=14,
        shared=22,
        prompt=90,
    ),
]


def configuration(model: TinyModel, vision: bool = False) -> dict[str, Any]:
    """config.json as transformers writes it, for the text model or the whole of it."""
    text = {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "attention_bias": False,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "hidden_size": model.hidden,
        "layer_types": [
            "full_attention" if layer == "A" else "linear_attention" for layer in model.layers
        ],
        "linear_conv_kernel_dim": model.conv,
        "linear_key_head_dim": model.key_dim,
        "linear_num_key_heads": model.key_heads,
        "linear_num_value_heads": model.value_heads,
        "linear_value_head_dim": model.value_dim,
        "max_position_embeddings": model.max_context,
        "moe_intermediate_size": model.intermediate,
        "num_attention_heads": model.query_heads,
        "num_experts": model.experts,
        "num_experts_per_tok": model.top_k,
        "num_hidden_layers": len(model.layers),
        "num_key_value_heads": model.kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": model.theta,
            "partial_rotary_factor": model.rotary_factor,
        },
        "shared_expert_intermediate_size": model.shared,
        "tie_word_embeddings": model.tied,
        "eos_token_id": 1,
        "vocab_size": model.vocab,
    }
    if not vision:
        return text
    return {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "text_config": text,
        "tie_word_embeddings": model.tied,
        "vision_config": {"model_type": "qwen3_5_moe_vision"},
    }


def tensors(model: TinyModel) -> Tensors:
    """Every weight f32 under the names of a text-only checkpoint, experts as banks."""
    result = _Draws(model.name)
    draw(model, result)
    return result.tensors


def draw(model: TinyModel, result: Draws) -> None:
    """Every weight in the order of the layers, each with the distribution it is drawn from."""
    hidden = model.hidden
    result.normal("model.embed_tokens.weight", (model.vocab, hidden), 0.5 / hidden**0.5)
    for index, kind in enumerate(model.layers):
        layer = f"model.layers.{index}."
        result.normal(layer + "input_layernorm.weight", (hidden,), 0.2)
        if kind == "D":
            _draw_delta(result, layer + "linear_attn.", model)
        else:
            _draw_attention(result, layer + "self_attn.", model)
        result.normal(layer + "post_attention_layernorm.weight", (hidden,), 0.2)
        _draw_moe(result, layer + "mlp.", model)
    result.normal("model.norm.weight", (hidden,), 0.2)
    if not model.tied:
        result.normal("lm_head.weight", (model.vocab, hidden), 0.6 / hidden**0.5)


def unfused(fused: Tensors) -> Tensors:
    """The same weights with a tensor per expert, as transformers saves them."""
    result: Tensors = {}
    for name, value in fused.items():
        stem, _, last = name.rpartition(".")
        if last == "gate_up_proj":
            for expert, matrix in enumerate(value):
                gate, up = np.split(matrix, 2)
                result[f"{stem}.{expert}.gate_proj.weight"] = gate
                result[f"{stem}.{expert}.up_proj.weight"] = up
        elif last == "down_proj":
            for expert, matrix in enumerate(value):
                result[f"{stem}.{expert}.down_proj.weight"] = matrix
        else:
            result[name] = value
    return result


def with_vision(text: Tensors) -> Tensors:
    """The same weights as part of the whole model, beside a vision tower and a draft layer."""
    result = {name.replace("model.", "model.language_model.", 1): x for name, x in text.items()}
    result["model.visual.pos_embed.weight"] = np.full((4, 4), np.nan, np.float32)
    result["mtp.fc.weight"] = np.ones((4, 8), np.float32)
    return result


def write_checkpoint(
    folder: Path,
    model: TinyModel,
    weights: Tensors | None = None,
    *,
    vision: bool = False,
    shards: int = 1,
) -> Path:
    """Write `weights` (those of `tensors` if not given) and config.json; returns `folder`."""
    weights = tensors(model) if weights is None else weights
    folder.mkdir(parents=True, exist_ok=True)
    config = configuration(model, vision)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 1]}', encoding="utf-8")
    if shards == 1:
        save_safetensors(folder / "model.safetensors", weights, model.dtype)
        return folder
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = dict(list(weights.items())[shard::shards])
        save_safetensors(folder / file, part, model.dtype)
        weight_map.update(dict.fromkeys(part, file))
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder


def save_safetensors(file: Path, weights: Mapping[str, np.ndarray], dtype: str = "F32") -> None:
    """Write tensors in the order given, stored as `dtype`."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    blobs, position = [], 0
    for name, value in weights.items():
        blob = _stored(value, dtype).tobytes()
        offsets = [position, position + len(blob)]
        header[name] = {"dtype": dtype, "shape": list(value.shape), "data_offsets": offsets}
        blobs.append(blob)
        position += len(blob)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(blobs))


def _stored(value: np.ndarray, dtype: str) -> np.ndarray:
    if dtype != "BF16":
        return value.astype(_BITS[dtype])
    bits = np.ascontiguousarray(value, np.float32).view(np.uint32)
    rounded: np.ndarray = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return rounded


def _generator(*key: str) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(zlib.crc32("/".join(key).encode())))


class Draws(Protocol):
    """Takes tensors with their distributions."""

    def normal(self, name: str, shape: tuple[int, ...], std: float, mean: float = 0.0) -> None: ...

    def uniform(self, name: str, shape: tuple[int, ...], low: float, high: float) -> None: ...


def _linear(result: Draws, name: str, shape: tuple[int, ...], gain: float = 1.0) -> None:
    """A matrix (or bank of them) that keeps the scale of its input, times `gain`."""
    result.normal(name, shape, gain / shape[-1] ** 0.5)


class _Draws:
    """Tensors by name, each drawn from a generator of its own."""

    def __init__(self, model: str) -> None:
        self.tensors: Tensors = {}
        self._model = model

    def normal(self, name: str, shape: tuple[int, ...], std: float, mean: float = 0.0) -> None:
        draw = _generator(self._model, name).standard_normal(shape)
        self.tensors[name] = (mean + std * draw).astype(np.float32)

    def uniform(self, name: str, shape: tuple[int, ...], low: float, high: float) -> None:
        draw = _generator(self._model, name).uniform(low, high, shape)
        self.tensors[name] = draw.astype(np.float32)


def _draw_delta(result: Draws, prefix: str, model: TinyModel) -> None:
    keys, values = model.key_heads * model.key_dim, model.value_heads * model.value_dim
    _linear(result, prefix + "in_proj_qkv.weight", (2 * keys + values, model.hidden))
    _linear(result, prefix + "in_proj_z.weight", (values, model.hidden))
    _linear(result, prefix + "in_proj_b.weight", (model.value_heads, model.hidden))
    _linear(result, prefix + "in_proj_a.weight", (model.value_heads, model.hidden))
    result.normal(prefix + "conv1d.weight", (2 * keys + values, 1, model.conv), 0.5)
    result.uniform(prefix + "A_log", (model.value_heads,), -3.0, 2.0)
    result.uniform(prefix + "dt_bias", (model.value_heads,), -4.0, 1.0)
    result.normal(prefix + "norm.weight", (model.value_dim,), 0.2, mean=1.0)
    _linear(result, prefix + "out_proj.weight", (model.hidden, values))


def _draw_attention(result: Draws, prefix: str, model: TinyModel) -> None:
    queries, keys = model.query_heads * model.head_dim, model.kv_heads * model.head_dim
    _linear(result, prefix + "q_proj.weight", (2 * queries, model.hidden))
    _linear(result, prefix + "k_proj.weight", (keys, model.hidden))
    _linear(result, prefix + "v_proj.weight", (keys, model.hidden))
    _linear(result, prefix + "o_proj.weight", (model.hidden, queries))
    result.normal(prefix + "q_norm.weight", (model.head_dim,), 0.2)
    result.normal(prefix + "k_norm.weight", (model.head_dim,), 0.2)


def _draw_moe(result: Draws, prefix: str, model: TinyModel) -> None:
    hidden, experts = model.hidden, model.experts
    _linear(result, prefix + "gate.weight", (experts, hidden), 1.5)
    _linear(result, prefix + "experts.gate_up_proj", (experts, 2 * model.intermediate, hidden), 1.5)
    _linear(result, prefix + "experts.down_proj", (experts, hidden, model.intermediate), 1.5)
    _linear(result, prefix + "shared_expert.gate_proj.weight", (model.shared, hidden), 1.5)
    _linear(result, prefix + "shared_expert.up_proj.weight", (model.shared, hidden))
    _linear(result, prefix + "shared_expert.down_proj.weight", (hidden, model.shared))
    _linear(result, prefix + "shared_expert_gate.weight", (1, hidden))
