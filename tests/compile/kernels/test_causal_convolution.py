"""causal_convolution against numpy, with its state carried from chunk to chunk."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from emberd.compile.isa.isa import Isa
from emberd.compile.kernels.causal_convolution import causal_convolution, reference
from random_shapes import odd, random_shapes

CASES = [(5, 4), (24, 2), (48, 4), (160, 3)]  # channels, kernel size
CASES += random_shapes("causal_convolution", lambda r: (odd(r, 1, 99), r.randint(2, 6)))
CHUNKS = [[9], [1] * 9, [1, 2, 1, 5], [4, 1, 4]]


@pytest.fixture(scope="module")
def library(isa: Isa, harness: Any) -> Any:
    return harness.library(
        isa,
        [
            causal_convolution(isa, channels=channels, kernel_size=size, tokens=tokens)
            for channels, size in CASES
            for tokens in (1, None)
        ],
    )


@pytest.mark.parametrize(("channels", "size"), CASES)
def test_every_chunking_agrees_with_the_reference_and_with_the_others(
    channels: int, size: int, harness: Any, library: Any
) -> None:
    random = np.random.default_rng(channels)
    x = random.standard_normal((9, channels)).astype(np.float32)
    weight = harness.aligned(random.standard_normal((channels, size)).astype(np.float32))
    initial = random.standard_normal((size - 1, channels)).astype(np.float32)

    def run(chunks: list[int]) -> tuple[np.ndarray, np.ndarray]:
        state = harness.aligned(initial)
        parts = []
        for chunk in np.split(x, np.cumsum(chunks)[:-1]):
            parts.append(harness.empty(np.float32, chunk.shape))
            suffix = "t1" if len(chunk) == 1 else "tn"
            symbol = f"causal_convolution_c{channels}_w{size}_{suffix}"
            library(symbol, harness.aligned(chunk), weight, state, parts[-1])
        return np.concatenate(parts), state

    y, state = run(CHUNKS[0])
    expected, expected_state = reference(
        x.astype(np.float64), weight.astype(np.float64), initial.astype(np.float64)
    )
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
    assert np.array_equal(state, expected_state)
    for chunks in CHUNKS[1:]:
        other, other_state = run(chunks)
        assert np.array_equal(y, other)
        assert np.array_equal(state, other_state)
