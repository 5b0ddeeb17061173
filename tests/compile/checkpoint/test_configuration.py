"""config.json: what is understood, and what is refused with its key and value named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import TinyModel, configuration
from emberd.compile.checkpoint.configuration import Configuration, read_configuration
from emberd.daemon.errors import EmberdError


def read(folder: Path, config: Any) -> Configuration:
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return read_configuration(folder)


def standard(**changes: Any) -> dict[str, Any]:
    """The text configuration of a tiny model with keys changed; None removes a key."""
    config = configuration(TinyModel("standard", layers="DDDA"))
    config.update(changes)
    return {key: value for key, value in config.items() if value is not None}


def test_text_and_whole_models_read_alike(tmp_path: Path) -> None:
    text = read(tmp_path, standard())
    whole = read(tmp_path, configuration(TinyModel("standard", layers="DDDA"), vision=True))
    assert text == whole
    assert text.architecture == "qwen3_5_moe"
    assert text.mixers == ("gated_delta",) * 3 + ("gated_attention",)
    attention, delta = text.dimensions.attention, text.dimensions.gated_delta
    assert attention is not None and delta is not None
    assert (attention.query_heads, attention.kv_heads, attention.head_dim) == (4, 2, 64)
    assert (attention.rotary_dim, attention.rope_theta) == (16, 1e7)
    assert (delta.key_heads, delta.value_heads, delta.conv_kernel) == (2, 4, 4)
    assert (delta.channels, delta.value_channels) == (256, 128)
    assert text.stop_tokens == (1,) and not text.tied_embeddings


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope_parameters": None, "rope_theta": 5e5, "partial_rotary_factor": 0.5}, (5e5, 32)),
        ({"rope_parameters": None, "rope_theta": 5e5}, (5e5, 16)),
        ({"rope_parameters": None}, (1e4, 16)),
        ({"rope_parameters": {"type": "default", "rope_theta": 7}, "rope_theta": 8}, (7.0, 16)),
        ({"rope_parameters": {"rope_type": "mrope", "mrope_section": [2, 1, 1]}}, (1e4, 16)),
        ({"rope_scaling": {"type": "mrope", "rope_theta": 9.0}}, (9.0, 16)),
    ],
)
def test_rotary_settings_new_and_old(
    tmp_path: Path, changes: dict[str, Any], expected: tuple[float, int]
) -> None:
    attention = read(tmp_path, standard(**changes)).dimensions.attention
    assert attention is not None
    assert (attention.rope_theta, attention.rotary_dim) == expected


@pytest.mark.parametrize(
    ("interval", "attention_layers"), [(None, [3]), (1, [0, 1, 2, 3]), (9, [])]
)
def test_layers_by_interval(
    tmp_path: Path, interval: int | None, attention_layers: list[int]
) -> None:
    config = read(tmp_path, standard(layer_types=None, full_attention_interval=interval))
    found = [layer for layer, kind in enumerate(config.mixers) if kind == "gated_attention"]
    assert found == attention_layers
    assert (config.dimensions.attention is None) == (not attention_layers)
    assert (config.dimensions.gated_delta is None) == (len(attention_layers) == 4)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "llama"}, "unknown architecture 'llama'; expected qwen3_5_moe or"),
        ({"model_type": None}, "missing key 'model_type'"),
        ({"attention_bias": True}, "attention_bias: expected no biases .* found True"),
        ({"hidden_act": "gelu"}, "hidden_act: expected 'silu' .* found 'gelu'"),
        ({"attn_output_gate": False}, "attn_output_gate: expected attention with an output gate"),
        ({"norm_topk_prob": False}, "norm_topk_prob: expected expert weights that sum to 1"),
        ({"mlp_only_layers": [1]}, r"mlp_only_layers: expected experts in every layer .* \[1\]"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step: expected experts in every layer"),
        ({"use_sliding_window": True}, "use_sliding_window: expected attention without"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config: expected a check"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters.rope_type: .* found 'yarn'"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.type: expected 'default'"),
        ({"rope_parameters": {"partial_rotary_factor": 1.5}}, "factor: .* of at most 1, found 1.5"),
        ({"rope_parameters": {"partial_rotary_factor": 0.05}}, "head_dim: expected a multiple"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim: .* at least 2, found 1"),
        ({"layer_types": ["linear_attention"]}, r"layer_types: expected num_hidden_layers \(4\)"),
        ({"layer_types": ["sliding"] * 4}, r"layer_types\[0\]: expected one of .* found 'sliding'"),
        ({"layer_types": "all"}, "layer_types: expected a list, found 'all'"),
        ({"hidden_size": 0}, "hidden_size: expected an integer of at least 1, found 0"),
        ({"hidden_size": "64"}, "hidden_size: expected an integer .* found '64'"),
        ({"hidden_size": True}, "hidden_size: expected an integer .* found True"),
        ({"vocab_size": None}, "missing key 'vocab_size'"),
        (
            {"num_experts_per_tok": 9},
            r"num_experts_per_tok: expected an integer in 1\.\.8, found 9",
        ),
        ({"num_key_value_heads": 3}, r"num_attention_heads: expected a multiple of .* \(3\)"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads: expected a multiple of"),
        ({"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size: expected"),
        ({"rms_norm_eps": 0}, "rms_norm_eps: expected a number above 0, found 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps: expected a number above 0, found nan"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings: expected true or false, found 'no'"),
        ({"eos_token_id": [1, "x"]}, r"eos_token_id\[1\]: expected an integer"),
    ],
)
def test_unsupported_settings_are_refused(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(EmberdError, match=reason) as raised:
        read(tmp_path, standard(**changes))
    assert str(tmp_path / "config.json") in str(raised.value)


def test_settings_of_the_text_model_inside_are_checked_too(tmp_path: Path) -> None:
    config = configuration(TinyModel("standard"), vision=True)
    config["text_config"]["hidden_act"] = "relu"
    with pytest.raises(EmberdError, match=r"text_config\.hidden_act: expected 'silu'"):
        read(tmp_path, config)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"{", "not valid JSON"),
        (b"[]", r"expected a mapping, found \[\]"),
        (b"\xff\xfe", "not UTF-8 text"),
        (b"[" * 100_000, "not valid JSON"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(EmberdError, match=reason):
        read_configuration(tmp_path)


def test_a_folder_without_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EmberdError, match=r"no config\.json: not a Hugging Face checkpoint"):
        read_configuration(tmp_path)
