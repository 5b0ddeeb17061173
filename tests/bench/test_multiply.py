"""What the names of kernels tell, and a row for each multiplication of a prompt."""

from __future__ import annotations

from pathlib import Path

import pytest
from emberd.daemon.artifact import Artifact

from bench import multiply
from bench.multiply import Multiplication, multiplication
from bench.peak import has_vnni
from bench.table import row


@pytest.mark.parametrize(
    ("symbol", "name", "operations"),
    [
        (
            "expert_outputs_q4a8_h2048_i512_e64_k8",
            "experts 2048 x 512",
            2 * 8 * 3 * 2048 * 512,
        ),
        ("shared_expert_q4a8_h64_s32_tn", "shared expert 64 x 32", 2 * 3 * 64 * 32),
        ("linear_residual_q4a8_n64_k96_tn", "linear 64 x 96", 2 * 64 * 96),
        ("linear_q8a16_n64_k96_tn", "linear 64 x 96", 2 * 2 * 64 * 96),
        ("projections_q4a8_n64_f32_n3_q8a8_n16_k96_tn", "projections 80 x 96", 2 * 80 * 96),
        (
            "projections_q4a8_n64_f32_n3_normed_eps0x1_0p20_zero_centred_k96_tn",
            "projections 64 x 96",
            2 * 64 * 96,
        ),
        ("projections_q4a8_n64_q4a16_n16_k96_tn", "projections 80 x 96", 2 * (64 + 32) * 96),
    ],
)
def test_names_of_kernels(symbol: str, name: str, operations: int) -> None:
    assert multiplication(symbol) == Multiplication(name, operations)


@pytest.mark.parametrize(
    "symbol",
    [
        "linear_q8a8_n49664_k2048_t1",
        "linear_f32_n64_k96_tn",
        "expert_outputs_f32_h64_i32_e4_k2",
        "router_h2048_e64_k8_tn",
        "gated_delta_rule_hk16_hv32_dk128_dv128_tn",
    ],
)
def test_other_kernels_are_left_out(symbol: str) -> None:
    assert multiplication(symbol) is None


@pytest.mark.skipif(not has_vnni(), reason="this processor has no AVX-512 VNNI")
def test_every_multiplication_of_the_embedded_model(demo_artifact: Path) -> None:
    rows = multiply.measure(Artifact.open(demo_artifact), threads=1, rounds=2)
    kinds = [row.figure.split(": ")[1].split()[0] for row in rows]
    assert {"experts", "shared", "linear", "projections"} <= set(kinds)
    for found in rows:
        assert found.samples == 2
        assert found.emberd > 0 and found.peer > 0


def test_the_table_marks_what_is_too_little() -> None:
    figure = "prefill 512: experts 2048 x 512 beside VNNI peak"
    rows = [
        row(figure, 2, "Gop/s", "higher", {"emberd": [rate, 650.0], "peer": [1000.0]})
        for rate in (649.0, 751.0)
    ]
    assert multiply.table(rows).splitlines()[2:] == [
        f"| {figure} | 2 | 650 (650) | 1000 (1000) | 65.0% ✗ | ≥ 70% |",
        f"| {figure} | 2 | 700 (751) | 1000 (1000) | 70.0% | ≥ 70% |",
    ]
