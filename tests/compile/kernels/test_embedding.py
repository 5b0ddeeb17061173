"""embedding: exactly the unpacked rows, in every format, on every ISA of this machine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from emberd.compile.isa.isa import Isa
from emberd.compile.kernels.embedding import embedding, embedding_scratch, reference
from emberd.compile.quantize.formats import FORMATS
from emberd.daemon.errors import EmberdError
from random_shapes import odd, random_shapes

CASES = [("f32", 11, 45), ("f32", 5, 64), ("q8", 50, 96), ("q4", 50, 96), ("q4", 16, 32)]
CASES += random_shapes(
    "embedding", lambda r: (r.choice(["q8", "q4"]), odd(r, 1, 70), 32 * r.randint(1, 9))
)


@pytest.fixture(scope="module")
def library(isa: Isa, harness: Any) -> Any:
    return harness.library(
        isa,
        [
            embedding(isa, format=name, vocabulary=vocabulary, hidden=hidden, tokens=tokens)
            for name, vocabulary, hidden in CASES
            for tokens in (1, None)
        ],
    )


@pytest.mark.parametrize(("name", "vocabulary", "hidden"), CASES)
@pytest.mark.parametrize("suffix", ["t1", "tn"])
def test_gives_the_rows_of_the_tokens(
    library: Any, harness: Any, name: str, vocabulary: int, hidden: int, suffix: str
) -> None:
    random = np.random.default_rng(vocabulary)
    weight = random.standard_normal((vocabulary, hidden)).astype(np.float32)
    packed = FORMATS[name].pack(weight)
    table = FORMATS[name].unpack(packed, vocabulary, hidden)
    argument = harness.aligned(table if name == "f32" else packed)
    ids = np.array([0, vocabulary - 1, 3, 3, *random.integers(0, vocabulary, 9)], np.int32)
    for part in [ids] if suffix == "tn" else ids.reshape(-1, 1):
        output = harness.empty(np.float32, (len(part), hidden))
        scratch = embedding_scratch(len(part), format=name, vocabulary=vocabulary, hidden=hidden)
        symbol = f"embedding_{name}_v{vocabulary}_h{hidden}_{suffix}"
        library(symbol, harness.aligned(part), argument, output, *harness.scratch(scratch))
        np.testing.assert_array_equal(output, reference(part, table))


def test_dimensions_that_the_format_cannot_take(isa: Isa) -> None:
    with pytest.raises(EmberdError, match="multiple of 32"):
        embedding(isa, format="q8", vocabulary=10, hidden=40, tokens=1)
