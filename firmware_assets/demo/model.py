"""The demo model: its configuration, the device's quantisation as straight-through fake
quantisation, and faster exact forms of two transformers functions for training on a CPU."""

from __future__ import annotations

import torch
import transformers.models.qwen3_5_moe.modeling_qwen3_5_moe as reference
from tokenizer import SPECIAL_TOKENS, VOCAB_SIZE
from torch import Tensor, nn
from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

GROUP = 32  # weights that share one scale, along the input dimension
Q8_WEIGHTS = ("embed_tokens.weight", "lm_head.weight")
Q4_WEIGHTS = (
    "in_proj_qkv.weight",
    "in_proj_z.weight",
    "out_proj.weight",
    "q_proj.weight",
    "k_proj.weight",
    "v_proj.weight",
    "o_proj.weight",
    "gate_up_proj",
    "gate_proj.weight",
    "up_proj.weight",
    "down_proj.weight",
    "down_proj",
)


def demo_config() -> Qwen3_5MoeTextConfig:
    """Four layers (3 gated-delta, 1 attention), 16 experts of which 2 are routed to."""
    first_special = VOCAB_SIZE - len(SPECIAL_TOKENS) - 2
    layer_types = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
    return Qwen3_5MoeTextConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=192,
        num_hidden_layers=len(layer_types),
        layer_types=layer_types,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        attn_output_gate=True,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        mamba_ssm_dtype="float32",
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        num_experts=16,
        num_experts_per_tok=2,
        eos_token_id=first_special + 2,
        pad_token_id=first_special,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000,
            "partial_rotary_factor": 0.25,
            "mrope_section": [3, 3, 2],
            "mrope_interleaved": True,
        },
    )


def quantise_q4(weight: Tensor) -> Tensor:
    """4-bit value of ``weight`` [..., K]: groups of 32 along K, one fp16 scale a group."""
    groups = weight.unflatten(-1, (-1, GROUP))
    peak = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    scale = (peak / -8).half().float()
    inverse = torch.where(scale == 0, torch.zeros_like(scale), 1 / scale)
    levels = (groups * inverse + 8.5).floor().clamp(0, 15) - 8
    return (levels * scale).flatten(-2)


def quantise_q8(weight: Tensor) -> Tensor:
    """8-bit value of ``weight`` [..., K]: symmetric, groups of 32 along K, one fp16 scale each."""
    groups = weight.unflatten(-1, (-1, GROUP))
    scale = (groups.abs().amax(-1, keepdim=True) / 127).half().float()
    inverse = torch.where(scale == 0, torch.zeros_like(scale), 1 / scale)
    return ((groups * inverse).round().clamp(-127, 127) * scale).flatten(-2)


def fake_quantised(model: nn.Module) -> dict[str, Tensor]:
    """The parameters of ``model`` as the device sees them, with straight-through gradients."""
    seen: dict[str, Tensor] = {}
    for name, weight in model.named_parameters():
        if name.endswith(Q4_WEIGHTS):
            seen[name] = weight + (quantise_q4(weight.detach()) - weight.detach())
        elif name.endswith(Q8_WEIGHTS):
            seen[name] = weight + (quantise_q8(weight.detach()) - weight.detach())
        else:
            seen[name] = weight
    return seen


def quantise_in_place(model: nn.Module) -> None:
    """Replace every weight of ``model`` by its quantised value."""
    for name, weight in model.named_parameters():
        if name.endswith(Q4_WEIGHTS):
            weight.data.copy_(quantise_q4(weight.data))
        elif name.endswith(Q8_WEIGHTS):
            weight.data.copy_(quantise_q8(weight.data))


def causal_conv_silu(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **kwargs: object,
) -> Tensor:
    """Depthwise causal convolution over ``hidden_states`` [B, C, T] as a sum of shifts."""
    del bias, activation, kwargs
    taps, length = weight.shape[-1], hidden_states.shape[-1]
    padded = nn.functional.pad(hidden_states, (taps - 1, 0))
    total = padded[..., :length] * weight[:, 0, None]
    for tap in range(1, taps):
        total = torch.addcmul(total, padded[..., tap : tap + length], weight[:, tap, None])
    return nn.functional.silu(total)


def use_fast_training_forms(chunk_size: int = 32) -> None:
    """Shorter delta-rule chunks and the shift convolution: the same results, less time."""
    chunked = reference.torch_chunk_gated_delta_rule

    def shorter_chunks(*args: Tensor, **kwargs: object) -> tuple[Tensor, Tensor | None]:
        output, state = chunked(*args, chunk_size=chunk_size, **kwargs)
        return output, state

    reference.torch_chunk_gated_delta_rule = shorter_chunks
    reference.causal_conv1d_fn = causal_conv_silu


def new_model(seed: int) -> Qwen3_5MoeForCausalLM:
    """A randomly initialised demo model."""
    torch.manual_seed(seed)
    model = Qwen3_5MoeForCausalLM(demo_config())
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("A_log"):
                weight.copy_(torch.empty_like(weight).uniform_(0.02, 4).log())
            elif name.endswith("dt_bias"):
                weight.uniform_(-4.0, 0.0)
    return model
