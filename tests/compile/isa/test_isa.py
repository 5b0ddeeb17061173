"""Instruction sets: exact integer dot products and float16 conversion, and who can run what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from emberd.compile.isa.isa import ISAS, Isa, host_isas
from emberd.compile.isa.vector import kernel, load, store
from tvm.script import tirx as T  # noqa: N812

QUADS = 8  # of 4 columns: one group
TRIALS = 64


def _dot(isa: Isa, zero_point: int) -> Any:
    """weights u8[TRIALS, 8, 4 * lanes], x i8[TRIALS, 8, 4], sums i32[TRIALS] -> y i32."""
    lanes = isa.lanes
    with kernel(f"dot_{zero_point}") as builder:
        weights = T.arg("weights", T.buffer((TRIALS, QUADS, 4 * lanes), "uint8"))
        x = T.arg("x", T.buffer((TRIALS, QUADS, 4), "int8"))
        sums = T.arg("sums", T.buffer((TRIALS,), "int32"))
        y = T.arg("y", T.buffer((TRIALS, lanes), "int32"))
        with T.sblock("root"), T.serial(0, TRIALS) as i:
            chunks = [load(weights, [i, j, 0], 4 * lanes) for j in range(QUADS)]
            quads = [T.reinterpret("int32", load(x, [i, j, 0], 4)) for j in range(QUADS)]
            store(y, isa.dot_group(zero_point, chunks, quads, sums[i]), [i, 0])
    return builder.get()


def _half(isa: Isa, count: int) -> Any:
    with kernel("half") as builder:
        bits = T.arg("bits", T.buffer((count,), "uint16"))
        y = T.arg("y", T.buffer((count,), "float32"))
        with T.sblock("root"), T.serial(0, count // isa.lanes) as i:
            at = [i * isa.lanes]
            store(y, isa.half_to_float(load(bits, at, isa.lanes)), at)
    return builder.get()


@pytest.fixture(scope="module")
def halves() -> np.ndarray:
    """All finite float16 numbers, as bits."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    return bits[np.isfinite(bits.view(np.float16))]


@pytest.fixture(scope="module")
def library(isa: Isa, harness: Any, halves: np.ndarray) -> Any:
    return harness.library(isa, [_dot(isa, 8), _dot(isa, 128), _half(isa, len(halves))])


@pytest.mark.parametrize(("zero_point", "lowest", "highest"), [(8, 0, 15), (128, 1, 255)])
def test_dot_product_is_exact_up_to_the_extremes(
    isa: Isa, library: Any, harness: Any, zero_point: int, lowest: int, highest: int
) -> None:
    random = np.random.default_rng(zero_point)
    weights = random.integers(lowest, highest + 1, (TRIALS, QUADS, isa.lanes, 4)).astype(np.uint8)
    x = random.integers(-127, 128, (TRIALS, QUADS, 4)).astype(np.int8)
    for trial, (weight, activation) in enumerate(
        [(lowest, 127), (lowest, -127), (highest, 127), (highest, -127), (zero_point, 127)]
    ):
        weights[trial], x[trial] = weight, activation
    y = harness.empty(np.int32, (TRIALS, isa.lanes))
    library(
        f"dot_{zero_point}",
        harness.aligned(weights.reshape(TRIALS, QUADS, -1)),
        harness.aligned(x),
        harness.aligned(x.sum(axis=(1, 2), dtype=np.int32)),
        y,
    )
    expected = np.einsum("tjlb,tjb->tl", weights.astype(np.int32) - zero_point, x.astype(np.int32))
    np.testing.assert_array_equal(y, expected)


def test_every_finite_half_is_converted_exactly(
    library: Any, harness: Any, halves: np.ndarray
) -> None:
    y = harness.empty(np.float32, halves.shape)
    library("half", harness.aligned(halves), y)
    expected = halves.view(np.float16).astype(np.float32)
    np.testing.assert_array_equal(y.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("name", ISAS)
def test_a_machine_runs_the_sets_whose_features_it_has(name: str, tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    features = " ".join(("fpu", "sse2", *ISAS[name].cpu_features))
    cpuinfo.write_text(f"processor\t: 0\nflags\t\t: {features}\n\nprocessor\t: 1\n")
    names = list(ISAS)
    assert [isa.name for isa in host_isas(cpuinfo)] == names[names.index(name) :]


def test_a_missing_feature_excludes_a_set(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    features = set(ISAS["avx512vnni"].cpu_features) - {"avx512_vnni"}
    cpuinfo.write_text(f"flags : {' '.join(features | {'sse2'})}\n")
    assert [isa.name for isa in host_isas(cpuinfo)] == ["avx2", "generic"]
