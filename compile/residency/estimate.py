"""What a device would make of a model: memory, experts that fit, hits, tokens per second."""

from __future__ import annotations

from dataclasses import dataclass

from emberd.compile.layout import Layout
from emberd.compile.traffic import decode_traffic
from emberd.daemon.activation_map import ActivationMap
from emberd.daemon.program import Section

# Resident memory of `emberd serve` beside the model's own.
PROCESS_BYTES = 50_000_000
# Share of the memory's read bandwidth that decoding reaches; `emberc bench` measures it.
REACHED = 0.8


@dataclass(frozen=True)
class Device:
    """Bytes of memory for the daemon; bytes per second that memory is read at, and the disk (None:
    not known)."""

    memory: int
    bandwidth: int
    disk: int | None


@dataclass(frozen=True)
class Use:
    """Sessions at the same time, and the tokens that each of them has come to."""

    sessions: int
    context: int


@dataclass(frozen=True)
class Sizes:
    """Bytes of an artifact and of what it needs beside it, by its layout."""

    layers: int
    experts: int
    top_k: int
    expert_bytes: int
    weights_bytes: int
    scratch_bytes: int
    state_bytes: int
    kv_bytes_per_token: int
    logits_bytes: int
    traffic_bytes: int
    """That a decoded token moves, without the KV cache."""

    @classmethod
    def of(cls, layout: Layout, layers: int, experts: int, top_k: int, vocab_size: int) -> Sizes:
        """From the layout alone: nothing is read or built."""
        sections = layout.program.section_bytes
        traffic = decode_traffic(layout.program, vocab_size, 0)
        moved = traffic.total - traffic.by_section.get(Section.KV, 0)
        return cls(
            layers=layers,
            experts=experts,
            top_k=top_k,
            expert_bytes=layout.expert_bytes,
            weights_bytes=layout.weights_bytes,
            scratch_bytes=sections["scratch"],
            state_bytes=sections["state"],
            kv_bytes_per_token=sections["kv_per_token"],
            logits_bytes=vocab_size * 4,
            traffic_bytes=round(moved),
        )

    @property
    def bank(self) -> int:
        """How many experts there are."""
        return self.layers * self.experts

    @property
    def bank_bytes(self) -> int:
        return self.bank * self.expert_bytes

    @property
    def token_demand(self) -> int:
        """Experts that a token needs."""
        return self.layers * self.top_k

    def fixed_bytes(self, use: Use) -> int:
        """Memory beside the experts."""
        session = self.state_bytes + self.kv_bytes_per_token * use.context + self.logits_bytes
        return PROCESS_BYTES + self.weights_bytes + self.scratch_bytes + use.sessions * session


@dataclass(frozen=True)
class Estimate:
    """`slots`: experts in memory; `hit_rate` is None where the model cannot run. One decoded token
    takes `memory_seconds` to read memory and reads `read_bytes` from the disk."""

    fixed_bytes: int
    slots: int
    hit_rate: float | None
    memory_seconds: float
    read_bytes: float

    def tokens_per_second(self, disk: int | None) -> float | None:
        """With a disk that is read at so many bytes per second. Reading from it and computing are
        taken to follow one another. None where the model cannot run, or the disk's rate would
        matter and is not known."""
        if self.hit_rate is None or (disk is None and self.read_bytes):
            return None
        return 1 / (self.memory_seconds + (self.read_bytes / disk if disk else 0.0))


def estimate(
    sizes: Sizes, device: Device, use: Use, activation_map: ActivationMap | None = None
) -> Estimate:
    """The estimate for one session that decodes.

    With a map: the hits of the experts that it has most mass for, by class, weighted by the
    priors. Without: all experts are taken to be equally likely, and none to be found again with
    fewer slots than token_demand.
    """
    fixed = sizes.fixed_bytes(use)
    slots = min(sizes.bank, max(0, device.memory - fixed) // sizes.expert_bytes)
    moved = sizes.traffic_bytes + sizes.kv_bytes_per_token * use.context
    memory_seconds = moved / (device.bandwidth * REACHED)
    if slots < sizes.top_k:
        return Estimate(fixed, slots, None, memory_seconds, 0.0)
    hit_rate = _hit_rate(sizes, slots, activation_map)
    missed = sizes.token_demand * (1 - hit_rate) * sizes.expert_bytes
    return Estimate(fixed, slots, hit_rate, memory_seconds, missed)


def _hit_rate(sizes: Sizes, slots: int, activation_map: ActivationMap | None) -> float:
    if slots == sizes.bank:
        return 1.0
    if activation_map is None:
        return slots / sizes.bank if slots >= sizes.token_demand else 0.0
    found = 0.0
    for index, prior in enumerate(activation_map.priors):
        masses = (activation_map.mass(i, index)[e] for i, e in activation_map.hottest(slots, index))
        found += prior * sum(masses) / sizes.layers
    return found
