"""The categories of characters, as the tokenizers library has them."""

from __future__ import annotations

from bisect import bisect_right

import pytest
from emberd.compile.categories import library_categories


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("aZ\u00e9\u4e2d\U00031350", "L"),  # the last one came with Unicode 15
        ("\u0301\u1715\U000e0100", "M"),
        ("0\u0661\u2167\U0001d7ff", "N"),
        ("!\u3002", "P"),
        ("+\u00b0\U0001f389", "S"),
        (" \t\n\u0085\u00a0\u2028\u3000", "Z"),
        ("\x00\u200d\ue000\uffff\U00040000\U000e1000\U0010ffff", "C"),
    ],
)
def test_characters_are_of_their_category(text: str, letter: str) -> None:
    table = library_categories()
    starts = memoryview(table.starts).cast("i").tolist()
    found = {table.letters.decode()[bisect_right(starts, ord(c)) - 1] for c in text}
    assert found == {letter}
    assert len(starts) < 5000
