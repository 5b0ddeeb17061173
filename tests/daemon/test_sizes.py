"""Sizes and rates as people write them."""

from __future__ import annotations

import pytest
from emberd.daemon.errors import EmberdError
from emberd.daemon.sizes import is_bare, read_rate, read_size


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("6G", 6 << 30),
        ("1g", 1 << 30),
        ("6GiB", 6 << 30),
        ("64Ki", 64 << 10),
        ("1.5M", 3 << 19),
        ("2T", 2 << 40),
        ("6GB", 6 * 10**9),
        ("500KB", 500_000),
        ("500 mb", 5 * 10**8),
        ("1TB", 10**12),
        ("4096", 4096),
        ("4096B", 4096),
        (" 0 ", 0),
    ],
)
def test_sizes(text: str, expected: int) -> None:
    assert read_size(text) == expected


@pytest.mark.parametrize(
    "text", ["", "G", "6X", "-1G", "6GG", "1e9", "6iB", "nan", "6G/s", "1" + "0" * 400 + "G"]
)
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(EmberdError, match="is not a size such as 6G: expected a number with K, M,"):
        read_size(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("400MB/s", 4 * 10**8),
        ("400MB", 4 * 10**8),
        ("1 GB /s", 10**9),
        ("2g/S", 2 << 30),
        ("9", 9),
    ],
)
def test_rates(text: str, expected: int) -> None:
    assert read_rate(text) == expected


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("fast", "is not a rate such as 400MB/s: expected"),
        ("0MB/s", "more than 0"),
        ("/s", "is not"),
    ],
)
def test_what_is_no_rate_is_refused(text: str, reason: str) -> None:
    with pytest.raises(EmberdError, match=reason):
        read_rate(text)


@pytest.mark.parametrize(("text", "bare"), [("6", True), ("1.5 ", True), ("6G", False)])
def test_a_number_may_lack_its_unit(text: str, bare: bool) -> None:
    assert is_bare(text) == bare
