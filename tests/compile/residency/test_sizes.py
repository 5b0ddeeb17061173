"""Sizes for people."""

from __future__ import annotations

import pytest
from emberd.compile.residency.sizes import size


@pytest.mark.parametrize(
    ("count", "expected"), [(12, "12 bytes"), (24_576, "24.58 kB"), (2.5e9, "2.50 GB")]
)
def test_sizes_for_people(count: float, expected: str) -> None:
    assert size(count) == expected
