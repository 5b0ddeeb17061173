"""The numbers that fix a model's tensors; blocks are built from them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionDimensions:
    """Gated softmax attention; query heads share KV heads in consecutive groups."""

    query_heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float

    @property
    def query_channels(self) -> int:
        return self.query_heads * self.head_dim

    @property
    def kv_channels(self) -> int:
        return self.kv_heads * self.head_dim


@dataclass(frozen=True)
class GatedDeltaDimensions:
    """Gated delta rule mixer; value heads share key heads in consecutive groups."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int

    @property
    def key_channels(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def value_channels(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Channels through the convolution: queries, keys and values."""
        return 2 * self.key_channels + self.value_channels


@dataclass(frozen=True)
class MoeDimensions:
    """Routed experts beside one shared expert."""

    experts: int
    top_k: int
    intermediate_size: int
    shared_intermediate_size: int


@dataclass(frozen=True)
class Dimensions:
    """A whole model. `attention` or `gated_delta` is None when no layer is of that kind."""

    hidden_size: int
    vocab_size: int
    layers: int
    eps: float
    max_context: int
    moe: MoeDimensions
    attention: AttentionDimensions | None = None
    gated_delta: GatedDeltaDimensions | None = None
