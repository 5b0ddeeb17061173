"""Instruction sets: exact integer products and float16 conversion, and who can run what."""

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


def _dot(isa: Isa, zero_point: int, planes: int) -> Any:
    """weights u8[TRIALS, 8, 4 * lanes], x i8[planes, TRIALS, 8, 4], biases i32[TRIALS] -> y i32."""
    lanes = isa.lanes
    with kernel(f"dot_{zero_point}_{planes}") as builder:
        weights = T.arg("weights", T.buffer((TRIALS, QUADS, 4 * lanes), "uint8"))
        x = T.arg("x", T.buffer((planes, TRIALS, QUADS, 4), "int8"))
        biases = T.arg("biases", T.buffer((TRIALS,), "int32"))
        y = T.arg("y", T.buffer((TRIALS, lanes), "int32"))
        with T.sblock("root"), T.serial(0, TRIALS) as i:
            chunks = [load(weights, [i, j, 0], 4 * lanes) for j in range(QUADS)]
            quads = [
                [T.reinterpret("int32", load(x, [plane, i, j, 0], 4)) for j in range(QUADS)]
                for plane in range(planes)
            ]
            store(y, isa.dot_group(zero_point, chunks, quads, biases[i]), [i, 0])
    return builder.get()


def _half(isa: Isa, count: int) -> Any:
    with kernel("half") as builder:
        bits = T.arg("bits", T.buffer((count,), "uint16"))
        y = T.arg("y", T.buffer((count,), "float32"))
        with T.sblock("root"), T.serial(0, count // isa.lanes) as i:
            at = [i * isa.lanes]
            store(y, isa.half_to_float(load(bits, at, isa.lanes)), at)
    return builder.get()


def _pairs(isa: Isa) -> Any:
    """total i32[TRIALS, lanes], a and b i16[TRIALS, 2 * lanes] -> y i32[TRIALS, lanes]."""
    lanes = isa.lanes
    with kernel("pairs") as builder:
        total = T.arg("total", T.buffer((TRIALS, lanes), "int32"))
        a, b = (T.arg(name, T.buffer((TRIALS, 2 * lanes), "int16")) for name in ("a", "b"))
        y = T.arg("y", T.buffer((TRIALS, lanes), "int32"))
        with T.sblock("root"), T.serial(0, TRIALS) as i:
            vectors = [load(x, [i, 0], 2 * lanes) for x in (a, b)]
            store(y, isa.add_pairs(load(total, [i, 0], lanes), *vectors), [i, 0])
    return builder.get()


@pytest.fixture(scope="module")
def halves() -> np.ndarray:
    """All finite float16 numbers, as bits."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    return bits[np.isfinite(bits.view(np.float16))]


@pytest.fixture(scope="module")
def library(isa: Isa, harness: Any, halves: np.ndarray) -> Any:
    dots = [_dot(isa, zero_point, planes) for zero_point in (8, 128) for planes in (1, 2)]
    return harness.library(isa, [*dots, _half(isa, len(halves)), _pairs(isa)])


@pytest.mark.parametrize("planes", [1, 2])
@pytest.mark.parametrize(("zero_point", "lowest", "highest"), [(8, 0, 15), (128, 1, 255)])
def test_dot_product_is_exact_up_to_the_extremes(
    isa: Isa, library: Any, harness: Any, zero_point: int, lowest: int, highest: int, planes: int
) -> None:
    random = np.random.default_rng(zero_point)
    weights = random.integers(lowest, highest + 1, (TRIALS, QUADS, isa.lanes, 4)).astype(np.uint8)
    x = random.integers(-127, 128, (planes, TRIALS, QUADS, 4)).astype(np.int8)
    for trial, (weight, activation) in enumerate(
        [(lowest, 127), (lowest, -127), (highest, 127), (highest, -127), (zero_point, 127)]
    ):
        weights[trial], x[:, trial] = weight, activation
    integers = x[0].astype(np.int32) if planes == 1 else 254 * x[0].astype(np.int32) + x[1]
    y = harness.empty(np.int32, (TRIALS, isa.lanes))
    library(
        f"dot_{zero_point}_{planes}",
        harness.aligned(weights.reshape(TRIALS, QUADS, -1)),
        harness.aligned(x),
        harness.aligned((-zero_point * integers.sum(axis=(1, 2))).astype(np.int32)),
        y,
    )
    expected = np.einsum("tjlb,tjb->tl", weights.astype(np.int32) - zero_point, integers)
    np.testing.assert_array_equal(y, expected)


def test_products_of_pairs_are_exact_up_to_the_extremes(
    isa: Isa, library: Any, harness: Any
) -> None:
    random = np.random.default_rng(0)
    a, b = random.integers(-32767, 32768, (2, TRIALS, isa.lanes, 2)).astype(np.int16)
    total = random.integers(-(2**31), 2**31, (TRIALS, isa.lanes)).astype(np.int32)
    for trial, (x, y) in enumerate([(32767, 32767), (32767, -32767), (-32767, -32767), (0, 1)]):
        a[trial], b[trial] = x, y
    rows = [harness.aligned(x.reshape(TRIALS, -1)) for x in (total, a, b)]
    result = harness.empty(np.int32, total.shape)
    library("pairs", *rows, result)
    exact = total + (a.astype(np.int64) * b).sum(axis=-1)
    np.testing.assert_array_equal(result, exact.astype(np.int32))


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
