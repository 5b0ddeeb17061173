"""The peer's model file: a converted model written as GGUF, for llama.cpp.

Every tensor gets the GGUF type that is as wide as the recipe's format, so that both sides read the
same bytes for a token: q4 is Q4_0 (18 bytes for 32 weights), q8 is Q8_0 (34). What llama.cpp wants
otherwise than a checkpoint has it (its model file qwen35moe.cpp says so):

- norms hold 1 + w, except the one behind the delta rule, which is plain already;
- the decay is stored as -exp(A_log);
- its value heads are tiled over the key heads (k0 k1 k0 k1), not grouped (k0 k0 k1 k1), wherever
  value heads are counted: rows of the projections, channels of the convolution, columns of the
  output projection;
- gate and up projections of the experts are two banks.

A vocabulary without a tokenizer is written as a count: both sides take token ids.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from emberd.compile.converted import BlockInstance, ConvertedModel
from emberd.compile.dimensions import AttentionDimensions, Dimensions, GatedDeltaDimensions
from emberd.compile.quantize.recipes import RECIPES, Recipe
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray

Floats = NDArray[np.float32]

ARCHITECTURE = gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.QWEN35MOE]
TYPES = {"f32": Type.F32, "q8": Type.Q8_0, "q4": Type.Q4_0}
POSITION_STREAMS = 3  # of the rotary embedding; the same position in each for text


@dataclass(frozen=True)
class PeerTensor:
    """One tensor of the file; `parts` gives it in runs of whole rows."""

    name: str
    shape: tuple[int, ...]
    type: Type
    parts: Callable[[], Iterator[Floats]]

    @property
    def bytes(self) -> int:
        values, size = gguf.GGML_QUANT_SIZES[self.type]
        count: int = math.prod(self.shape) // values * size
        return count


def write(model: ConvertedModel, recipe: str, path: Path) -> None:
    """Write `model` to `path`, quantised as `recipe` has it; holds one expert or matrix at a time.

    The dimensions must be ones that llama.cpp takes: keys as wide as values in the delta rule.
    """
    writer = gguf.GGUFWriter(path, ARCHITECTURE)
    _add_parameters(writer, model)
    tensors = list(peer_tensors(model, RECIPES[recipe]))
    for tensor in tensors:
        dtype = np.dtype(np.float32)
        writer.add_tensor_info(tensor.name, tensor.shape, dtype, tensor.bytes, tensor.type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in tensors:
        quantised = [gguf.quantize(part, tensor.type) for part in tensor.parts()]
        writer.write_tensor_data(np.concatenate(quantised))
    writer.close()


def peer_tensors(model: ConvertedModel, recipe: Recipe) -> Iterator[PeerTensor]:
    """The tensors of the file in order."""
    for instance in model.stack:
        for weight in instance.weights:
            yield from _tensors_of(model, recipe, instance, weight)


def _tensors_of(
    model: ConvertedModel, recipe: Recipe, instance: BlockInstance, weight: str
) -> Iterator[PeerTensor]:
    kind = TYPES[recipe.format_of(instance.block, weight)]
    reference = instance.weights[weight]
    prefix = "" if instance.layer is None else f"blk.{instance.layer}."
    if weight == "experts_gate_up":
        experts, rows, columns = reference.shape
        half = rows // 2
        for name, first in (("ffn_gate_exps", 0), ("ffn_up_exps", half)):

            def halves(first: int = first) -> Iterator[Floats]:
                for expert in range(experts):
                    yield model.read_expert(reference, expert)[first : first + half]

            yield PeerTensor(f"{prefix}{name}.weight", (experts, half, columns), kind, halves)
    elif weight == "experts_down":

        def banks() -> Iterator[Floats]:
            for expert in range(reference.shape[0]):
                yield model.read_expert(reference, expert)

        yield PeerTensor(f"{prefix}ffn_down_exps.weight", reference.shape, kind, banks)
    else:
        change = _change(weight, model.dimensions)
        shape = reference.shape[1:] if weight == "shared_expert_gate" else reference.shape

        def whole() -> Iterator[Floats]:
            yield change(model.read_weight(reference)).reshape(shape)

        yield PeerTensor(prefix + NAMES[instance.block][weight], shape, kind, whole)


NAMES = {
    "embed": {"embedding": "token_embd.weight"},
    "gated_delta": {
        "input_norm": "attn_norm.weight",
        "in_proj_qkv": "attn_qkv.weight",
        "in_proj_z": "attn_gate.weight",
        "in_proj_b": "ssm_beta.weight",
        "in_proj_a": "ssm_alpha.weight",
        "conv": "ssm_conv1d.weight",
        "A_log": "ssm_a",
        "dt_bias": "ssm_dt.bias",
        "output_norm": "ssm_norm.weight",
        "out_proj": "ssm_out.weight",
    },
    "gated_attention": {
        "input_norm": "attn_norm.weight",
        "q_proj": "attn_q.weight",
        "k_proj": "attn_k.weight",
        "v_proj": "attn_v.weight",
        "q_norm": "attn_q_norm.weight",
        "k_norm": "attn_k_norm.weight",
        "o_proj": "attn_output.weight",
    },
    "moe": {
        "post_norm": "post_attention_norm.weight",
        "router": "ffn_gate_inp.weight",
        "shared_gate_proj": "ffn_gate_shexp.weight",
        "shared_up_proj": "ffn_up_shexp.weight",
        "shared_down_proj": "ffn_down_shexp.weight",
        "shared_expert_gate": "ffn_gate_inp_shexp.weight",
    },
    "head": {"final_norm": "output_norm.weight", "lm_head": "output.weight"},
}
"""llama.cpp's name of a weight, by block and canonical name; banks of experts aside."""


def _change(weight: str, dimensions: Dimensions) -> Callable[[Floats], Floats]:
    """What turns a checkpoint's weight into the one that llama.cpp expects."""
    if weight in ("input_norm", "post_norm", "q_norm", "k_norm", "final_norm"):
        return lambda x: x + np.float32(1)
    delta = dimensions.gated_delta
    if delta is None:
        return lambda x: x
    keys = 2 * delta.key_channels
    heads, channels = tiled_order(delta, 1), tiled_order(delta, delta.value_dim)
    changes: dict[str, Callable[[Floats], Floats]] = {
        "in_proj_qkv": lambda x: np.concatenate([x[:keys], x[keys:][channels]]),
        "conv": lambda x: np.concatenate([x[:keys], x[keys:][channels]]),
        "in_proj_z": lambda x: x[channels],
        "in_proj_b": lambda x: x[heads],
        "in_proj_a": lambda x: x[heads],
        "dt_bias": lambda x: x[heads],
        "A_log": lambda x: -np.exp(x[heads]),
        "out_proj": lambda x: np.ascontiguousarray(x[:, channels]),
    }
    return changes.get(weight, lambda x: x)


def tiled_order(delta: GatedDeltaDimensions, width: int) -> NDArray[np.intp]:
    """Where each of the value heads' channels, `width` a head, is taken from."""
    heads = np.arange(delta.value_heads * width).reshape(delta.key_heads, -1, width)
    return heads.swapaxes(0, 1).reshape(-1)


def _add_parameters(writer: gguf.GGUFWriter, model: ConvertedModel) -> None:
    dimensions = model.dimensions
    writer.add_context_length(dimensions.max_context)
    writer.add_embedding_length(dimensions.hidden_size)
    writer.add_block_count(dimensions.layers)
    writer.add_layer_norm_rms_eps(dimensions.eps)
    writer.add_vocab_size(dimensions.vocab_size)
    _add_tokenizer(writer, model)
    writer.add_expert_count(dimensions.moe.experts)
    writer.add_expert_used_count(dimensions.moe.top_k)
    writer.add_expert_feed_forward_length(dimensions.moe.intermediate_size)
    writer.add_expert_shared_feed_forward_length(dimensions.moe.shared_intermediate_size)
    mixers = [instance.block for instance in model.stack if instance.block.startswith("gated_")]
    writer.add_array(
        f"{ARCHITECTURE}.attention.recurrent_layers", [mixer == "gated_delta" for mixer in mixers]
    )
    _add_attention(writer, dimensions.attention)
    _add_gated_delta(writer, dimensions.gated_delta)


def _add_tokenizer(writer: gguf.GGUFWriter, model: ConvertedModel) -> None:
    """That of the checkpoint, a byte-level BPE of Qwen3.5's kind."""
    if not (model.folder / "tokenizer.json").exists():
        writer.add_tokenizer_model("none")
        return
    tokenizer, settings = (
        json.loads((model.folder / name).read_text(encoding="utf-8"))
        for name in ("tokenizer.json", "tokenizer_config.json")
    )
    count = model.dimensions.vocab_size
    pieces = [f"[unused {id}]" for id in range(count)]
    kinds = [gguf.TokenType.UNUSED] * count
    for piece, id in tokenizer["model"]["vocab"].items():
        pieces[id], kinds[id] = piece, gguf.TokenType.NORMAL
    for token in tokenizer["added_tokens"]:
        pieces[token["id"]], kinds[token["id"]] = token["content"], gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen35")
    writer.add_token_list(pieces)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_eos_token_id(pieces.index(settings["eos_token"]))
    writer.add_add_bos_token(False)
    writer.add_chat_template((model.folder / "chat_template.jinja").read_text(encoding="utf-8"))


def _add_attention(writer: gguf.GGUFWriter, attention: AttentionDimensions | None) -> None:
    assert attention is not None, "llama.cpp takes no model without attention layers"
    writer.add_head_count(attention.query_heads)
    writer.add_head_count_kv(attention.kv_heads)
    writer.add_key_length(attention.head_dim)
    writer.add_value_length(attention.head_dim)
    writer.add_rope_freq_base(attention.rope_theta)
    writer.add_rope_dimension_count(attention.rotary_dim)
    pairs = attention.rotary_dim // 2
    sections = [len(range(stream, pairs, POSITION_STREAMS)) for stream in range(POSITION_STREAMS)]
    writer.add_rope_dimension_sections([*sections, 0])


def _add_gated_delta(writer: gguf.GGUFWriter, delta: GatedDeltaDimensions | None) -> None:
    assert delta is not None, "llama.cpp takes no model without gated delta layers"
    assert delta.key_dim == delta.value_dim, "llama.cpp takes only keys as wide as values"
    writer.add_ssm_conv_kernel(delta.conv_kernel)
    writer.add_ssm_state_size(delta.key_dim)
    writer.add_ssm_group_count(delta.key_heads)
    writer.add_ssm_time_step_rank(delta.value_heads)
    writer.add_ssm_inner_size(delta.value_channels)
