"""Which characters the tokenizers library takes for letters, digits and so on.

Python's tables are of another version of Unicode, on every device maybe, than those by which a
model's texts were cut. So an artifact brings the library's.
"""

from __future__ import annotations

import struct
from functools import cache

from emberd.daemon.pre_tokenizer import OTHER, Categories
from tokenizers import Regex
from tokenizers.pre_tokenizers import Split

_EXPRESSIONS = {
    "L": r"\p{L}",
    "M": r"\p{M}",
    "N": r"\p{N}",
    "P": r"\p{P}",
    "S": r"\p{S}",
    "Z": r"\s",
}
# Surrogates are no characters; in the planes left out is nothing yet, or what is of no category.
_PLANES = (range(0xD800), range(0xE000, 0x40000), range(0xE0000, 0xE1000))


@cache
def library_categories() -> Categories:
    """Of every character, by the library's regular expressions."""
    starts, letters = [], []
    for plane in _PLANES:
        text = "".join(map(chr, plane))
        runs = _runs(text)
        found = _letters("".join(text[run] for run in runs))
        starts += [*(plane[run] for run in runs), plane.stop]
        letters += [*found, OTHER]
    return Categories(struct.pack(f"<{len(starts)}i", *starts), "".join(letters).encode())


def _runs(text: str) -> list[int]:
    """Where characters of another category begin."""
    any_run = "|".join(f"{expression}+" for expression in _EXPRESSIONS.values())
    return [start for _, (start, _) in Split(Regex(any_run), "isolated").pre_tokenize_str(text)]


def _letters(text: str) -> list[str]:
    """The category of each character."""
    found = [OTHER] * len(text)
    for letter, expression in _EXPRESSIONS.items():
        others = Split(Regex(expression), "removed").pre_tokenize_str(text)
        ends = [0, *(position for _, span in others for position in span), len(text)]
        for start, end in zip(ends[::2], ends[1::2], strict=True):
            found[start:end] = letter * (end - start)
    return found
