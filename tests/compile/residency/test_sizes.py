"""Sizes and rates as people write them."""

from __future__ import annotations

import pytest
from emberd.compile.residency.sizes import read_rate, read_size, size
from emberd.daemon.errors import EmberdError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("6G", 6 * 10**9),
        ("6GB", 6 * 10**9),
        ("1.5GiB", 3 << 29),
        ("500 MB", 5 * 10**8),
        ("64k", 64_000),
        ("64Ki", 65_536),
        ("4096", 4096),
        ("0", 0),
    ],
)
def test_sizes(text: str, expected: int) -> None:
    assert read_size(text) == expected


@pytest.mark.parametrize("text", ["", "G", "6X", "-1G", "6GG", "1e9", "6iB", "nan", "6G/s"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(EmberdError, match="is not a size such as 6G"):
        read_size(text)


def test_rates() -> None:
    assert read_rate("400MB/s") == read_rate("400MB") == 4 * 10**8
    with pytest.raises(EmberdError, match="more than 0"):
        read_rate("0MB/s")


@pytest.mark.parametrize(
    ("count", "expected"), [(12, "12 bytes"), (24_576, "24.58 kB"), (2.5e9, "2.50 GB")]
)
def test_sizes_for_people(count: float, expected: str) -> None:
    assert size(count) == expected
