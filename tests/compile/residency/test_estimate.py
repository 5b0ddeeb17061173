"""Estimates against arithmetic by hand."""

from __future__ import annotations

import pytest
from activation_maps import random_map
from emberd.compile.residency.estimate import (
    PROCESS_BYTES,
    REACHED,
    Device,
    Sizes,
    Use,
    estimate,
)

SIZES = Sizes(
    layers=3,
    experts=8,
    top_k=2,
    expert_bytes=1_000_000,
    weights_bytes=5_000_000,
    scratch_bytes=2_000_000,
    state_bytes=300_000,
    kv_bytes_per_token=1_000,
    logits_bytes=4_000,
    traffic_bytes=11_000_000,
)
USE = Use(sessions=2, context=500)
DISK = 50_000_000
FIXED = PROCESS_BYTES + 5_000_000 + 2_000_000 + 2 * (300_000 + 500_000 + 4_000)


def device(experts: int, spare: int = 0) -> Device:
    """With memory for so many experts, and some bytes more."""
    return Device(FIXED + experts * 1_000_000 + spare, bandwidth=10**9, disk=DISK)


@pytest.mark.parametrize("experts", [24, 30])
def test_a_bank_that_fits_is_never_read_from_disk(experts: int) -> None:
    made = estimate(SIZES, device(experts), USE)
    assert (made.fixed_bytes, made.slots, made.hit_rate) == (FIXED, 24, 1.0)
    assert made.read_bytes == 0
    assert made.memory_seconds == pytest.approx(11.5e6 / (1e9 * REACHED))
    for disk in (DISK, None):
        assert made.tokens_per_second(disk) == pytest.approx(1e9 * REACHED / 11.5e6)


def test_without_a_map_hits_are_the_share_that_fits() -> None:
    made = estimate(SIZES, device(12, spare=999_999), USE)
    assert (made.slots, made.hit_rate) == (12, 0.5)
    assert made.read_bytes == 6 * 0.5 * 1e6
    assert made.tokens_per_second(DISK) == pytest.approx(1 / (made.memory_seconds + 3e6 / 50e6))
    assert made.tokens_per_second(None) is None


def test_fewer_slots_than_token_demand_hit_nothing() -> None:
    made = estimate(SIZES, device(5), USE)
    assert (made.slots, made.hit_rate) == (5, 0.0)
    assert made.read_bytes == 6 * 1e6


@pytest.mark.parametrize("memory", [0, FIXED, FIXED + 1_999_999])
def test_without_room_for_the_experts_of_a_layer_it_cannot_run(memory: int) -> None:
    made = estimate(SIZES, Device(memory, 1, 1), USE)
    assert made.hit_rate is None and made.tokens_per_second(1) is None


def test_a_map_says_what_the_likeliest_experts_take() -> None:
    found = random_map(3, 8, 2)
    made = estimate(SIZES, device(9), USE, found)
    expected = 0.0
    for index, prior in enumerate(found.priors):
        masses = sorted((m for i in range(3) for m in found.mass(i, index)), reverse=True)
        expected += prior * sum(masses[:9]) / 3
    assert made.hit_rate == pytest.approx(expected)
    assert estimate(SIZES, device(9), USE).hit_rate < expected < 1
