"""config.json of `qwen3_5_moe` checkpoints: dimensions, and refusal of what the blocks cannot say.

Source: `Qwen3_5MoeTextConfig` of Hugging Face transformers, whose defaults are followed where a key
may be absent.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from emberd.compile.converted import kind_of
from emberd.compile.dimensions import (
    AttentionDimensions,
    Dimensions,
    GatedDeltaDimensions,
    MoeDimensions,
)
from emberd.compile.document import Node, read_json
from emberd.daemon.errors import EmberdError

ARCHITECTURE = "qwen3_5_moe"
CONFIG_FILE = "config.json"
_MODEL_TYPES = (ARCHITECTURE, "qwen3_5_moe_text")
_MIXERS = {"linear_attention": "gated_delta", "full_attention": "gated_attention"}
_PLAIN_ROPE_TYPES = ("default", "mrope")  # with text alone, mrope's three positions are one
_DEFAULT_ROPE_THETA = 10_000.0
_DEFAULT_ROTARY_FACTOR = 0.25
_DEFAULT_ATTENTION_INTERVAL = 4


@dataclass(frozen=True)
class Configuration:
    """What config.json says of the language model; `mixers` has one block kind per layer."""

    architecture: str
    dimensions: Dimensions
    mixers: tuple[str, ...]
    tied_embeddings: bool
    stop_tokens: tuple[int, ...]


def read_configuration(folder: Path) -> Configuration:
    """Read and check config.json of a checkpoint; EmberdError names the key and what it expects."""
    file = folder / CONFIG_FILE
    if not file.is_file():
        raise EmberdError(
            f"{folder}: no {CONFIG_FILE}: not a Hugging Face checkpoint folder"
            + (f"; {kind}" if (kind := kind_of(folder)) else "")
        )
    root = read_json(file)
    model_type = root["model_type"].text()
    if model_type not in _MODEL_TYPES:
        raise EmberdError(
            f"{file}: unknown architecture '{model_type}'; expected {' or '.join(_MODEL_TYPES)}"
        )
    text = root.get("text_config") or root
    _refuse_unsupported(root)
    _refuse_unsupported(text)
    mixers = _mixers(text)
    ties = [node.get("tie_word_embeddings") for node in (root, text)]
    return Configuration(
        architecture=ARCHITECTURE,
        dimensions=_dimensions(text, mixers),
        mixers=mixers,
        tied_embeddings=any(tie is not None and tie.boolean() for tie in ties),
        stop_tokens=tuple(dict.fromkeys(stop_tokens(root) + stop_tokens(text))),
    )


def stop_tokens(node: Node) -> list[int]:
    """`eos_token_id` of a configuration: absent, one token or several."""
    ids = node.get("eos_token_id")
    if ids is None:
        return []
    return (
        [item.integer() for item in ids.sequence()]
        if isinstance(ids.value, list)
        else [ids.integer()]
    )


def _refuse_unsupported(node: Node) -> None:
    """Raise at the first setting that changes the computation and that no block expresses."""
    for key, accepted, name in (
        ("attention_bias", False, "no biases in attention"),
        ("hidden_act", "silu", "'silu'"),
        ("attn_output_gate", True, "attention with an output gate"),
        ("norm_topk_prob", True, "expert weights that sum to 1"),
        ("decoder_sparse_step", 1, "experts in every layer"),
        ("mlp_only_layers", [], "experts in every layer"),
        ("use_sliding_window", False, "attention without a window"),
    ):
        setting = node.get(key)
        if setting is not None and setting.value != accepted:
            setting.fail(f"{name} (the only kind emberc can express)")
    quantization = node.get("quantization_config")
    if quantization is not None:
        quantization.fail("a checkpoint in bf16, f16 or f32 (emberc quantises itself)")


def _mixers(text: Node) -> tuple[str, ...]:
    layers = text["num_hidden_layers"].integer(1, 4096)
    listed = text.get("layer_types")
    if listed is None:
        given = text.get("full_attention_interval")
        interval = _DEFAULT_ATTENTION_INTERVAL if given is None else given.integer(1)
        return tuple(
            "gated_delta" if (layer + 1) % interval else "gated_attention"
            for layer in range(layers)
        )
    kinds = listed.sequence()
    if len(kinds) != layers:
        listed.fail(f"num_hidden_layers ({layers}) kinds of layer")
    for kind in kinds:
        if kind.text() not in _MIXERS:
            kind.fail(f"one of {', '.join(_MIXERS)}")
    return tuple(_MIXERS[kind.text()] for kind in kinds)


def _dimensions(text: Node, mixers: tuple[str, ...]) -> Dimensions:
    experts = text["num_experts"].integer(1)
    eps = text.get("rms_norm_eps")
    return Dimensions(
        hidden_size=text["hidden_size"].integer(1),
        vocab_size=text["vocab_size"].integer(1, 2**31 - 1),
        layers=len(mixers),
        eps=1e-6 if eps is None else eps.number(above=0),
        max_context=text["max_position_embeddings"].integer(1, 2**31 - 1),
        moe=MoeDimensions(
            experts=experts,
            top_k=text["num_experts_per_tok"].integer(1, experts),
            intermediate_size=text["moe_intermediate_size"].integer(1),
            shared_intermediate_size=text["shared_expert_intermediate_size"].integer(1),
        ),
        attention=_attention(text) if "gated_attention" in mixers else None,
        gated_delta=_gated_delta(text) if "gated_delta" in mixers else None,
    )


def _attention(text: Node) -> AttentionDimensions:
    kv_heads = text["num_key_value_heads"].integer(1)
    query_heads = text["num_attention_heads"].integer(1)
    if query_heads % kv_heads:
        text["num_attention_heads"].fail(f"a multiple of num_key_value_heads ({kv_heads})")
    head_dim = text["head_dim"].integer(2)
    theta, factor = _rope(text)
    rotary_dim = int(head_dim * factor)
    if rotary_dim < 2 or rotary_dim % 2:
        text["head_dim"].fail(f"a multiple of 2 times partial_rotary_factor ({factor:g})")
    return AttentionDimensions(query_heads, kv_heads, head_dim, rotary_dim, theta)


def _rope(text: Node) -> tuple[float, float]:
    """(theta, fraction of the head that rotates), from today's keys or those of older files."""
    places = [text.get("rope_scaling") or text.get("rope_parameters"), text]
    nodes = [node for node in places if node is not None]
    for key in ("rope_type", "type"):
        kind = nodes[0].get(key) if nodes[0] is not text else None
        if kind is not None and kind.text() not in _PLAIN_ROPE_TYPES:
            kind.fail("'default' (the only rotary embedding emberc can express)")
    thetas = [node.get("rope_theta") for node in nodes]
    factors = [node.get("partial_rotary_factor") for node in nodes]
    theta = next((node.number(above=0) for node in thetas if node), _DEFAULT_ROPE_THETA)
    factor = next((node.number(above=0, at_most=1) for node in factors if node), None)
    return theta, _DEFAULT_ROTARY_FACTOR if factor is None else factor


def _gated_delta(text: Node) -> GatedDeltaDimensions:
    key_heads = text["linear_num_key_heads"].integer(1)
    value_heads = text["linear_num_value_heads"].integer(1)
    if value_heads % key_heads:
        text["linear_num_value_heads"].fail(f"a multiple of linear_num_key_heads ({key_heads})")
    return GatedDeltaDimensions(
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=text["linear_key_head_dim"].integer(1),
        value_dim=text["linear_value_head_dim"].integer(1),
        conv_kernel=text["linear_conv_kernel_dim"].integer(2),
    )
