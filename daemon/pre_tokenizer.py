"""A text into words, before byte-pair encoding: normalizer and pre-tokenizer of a tokenizer.json.

Those of GPT-2 and its heirs, Unicode's NFC and one regular expression whose matches and gaps are
the words, need the standard library only, and a table of the characters' categories. The tokenizers
library weighs 7 MB in memory and is several times slower: it is imported for others.
"""

from __future__ import annotations

import codecs
import json
import re
import unicodedata
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, Protocol


def _alphabet() -> str:
    """GPT-2's byte alphabet: printable bytes stand for themselves, the others for U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return "".join(chr(byte if byte in printable else next(others)) for byte in range(256))


ALPHABET = _alphabet()
_BYTES = codecs.charmap_build(ALPHABET)

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# Python's expressions know no Unicode properties. So they are matched against a text in which a
# character beyond ASCII is replaced by one, from the private use area, that stands for all of its
# category. Only those stay that letters of ASCII match where case is ignored.
OTHER = "C"
_STANDING = {category: chr(0xE000 + i) for i, category in enumerate("LMNPSZ" + OTHER)}
_FOLDED = "\u017f\u212a"
_PROPERTIES = {
    "L": f"A-Za-z{_FOLDED}{_STANDING['L']}",
    "M": _STANDING["M"],
    "N": f"0-9{_STANDING['N']}",
    "P": rf"!-#%-*,-/:;?@\[-\]_{{}}{_STANDING['P']}",
    "S": rf"$+<->\^`|~{_STANDING['S']}",
}
_SPACE = rf"\t-\r {_STANDING['Z']}"

_ELEMENT = re.compile(
    r"\\p\{(?P<property>[LMNPS])\}|(?P<space>\\s)|(?P<other>\\S)|(?P<open>\[\^?)"
    r"|\\[rnt]|\(\?(?:i?:|[!=])|\((?!\?)|[?*+]\+?|\{\d+(?:,\d*)?\}(?!\+)|[)|]"
    r"|[A-Za-z0-9 '\"/!#%,:;<=>@_`~]"
)
_CLASS_ELEMENT = re.compile(
    r"\\p\{(?P<property>[LMNPS])\}|(?P<space>\\s)|(?P<close>\])"
    r"|\\[rnt]|[A-Za-z0-9]-[A-Za-z0-9]|[A-Za-z0-9 '\"/!#%,:;<=>@_`~.?*+(){}|$](?!-)"
)


def spelled_bytes(text: str) -> bytes:
    """What characters of the alphabet stand for. Raises UnicodeEncodeError for others."""
    data, _ = codecs.charmap_encode(text, "strict", _BYTES)
    return data


@dataclass(frozen=True)
class Categories:
    """Letters L, marks M, numbers N, punctuation P, symbols S, white space Z; others: OTHER.

    `starts`: int32, ascending, the codes from which on characters are of the category whose letter
    is at the same index of `letters`, up to the next one's. Raises ValueError for other tables.
    """

    starts: bytes
    letters: bytes

    def __post_init__(self) -> None:
        codes = memoryview(self.starts).cast("i").tolist()
        if (
            len(codes) != len(self.letters)
            or codes[:1] != [0]
            or any(start >= end for start, end in pairwise(codes))
            or not set(self.letters.decode()) <= _STANDING.keys()
        ):
            raise ValueError("no table of categories")


class PreTokenizer(Protocol):
    """Cuts texts into words."""

    def split(self, text: str) -> tuple[bytes, array[int]]:
        """The bytes of the normalized text, UTF-8, and int64 where each word's end."""


class _Expression:
    """One regular expression, after NFC if `normalized`."""

    def __init__(
        self, normalized: bool, expression: re.Pattern[str], categories: Categories
    ) -> None:
        self._normalized = normalized
        self._expression = expression
        self._standing = _Standing(categories)

    def split(self, text: str) -> tuple[bytes, array[int]]:
        if self._normalized:
            text = unicodedata.normalize("NFC", text)
        if text.isascii():
            return text.encode(), array("q", self._ends(text))
        ends = self._ends(text.translate(self._standing))
        words = [text[start:end].encode() for start, end in pairwise([0, *ends])]
        return b"".join(words), array("q", accumulate(map(len, words)))

    def _ends(self, text: str) -> Iterator[int]:
        """Where matches and the gaps between them end."""
        position = 0
        for match in self._expression.finditer(text):
            for end in match.span():
                if end > position:
                    yield end
                    position = end
        if position < len(text):
            yield len(text)


class _Standing:
    """A table for str.translate: what stands for the character of a code."""

    def __init__(self, categories: Categories) -> None:
        self._starts = memoryview(categories.starts).cast("i")
        self._letters = categories.letters.decode()
        self._find = lru_cache(1 << 12)(self._search)

    def __getitem__(self, code: int) -> str:
        return self._find(code)

    def _search(self, code: int) -> str:
        if code < 0x80 or chr(code) in _FOLDED:
            return chr(code)
        return _STANDING[self._letters[bisect_right(self._starts, code) - 1]]


class _Library:
    """The tokenizers library's, whatever it does."""

    def __init__(self, pipeline: str) -> None:
        from tokenizers import Tokenizer

        loaded = Tokenizer.from_str(pipeline)
        self._normalizer = loaded.normalizer
        self._splitter = loaded.pre_tokenizer

    def split(self, text: str) -> tuple[bytes, array[int]]:
        if self._normalizer is not None:
            text = self._normalizer.normalize_str(text)
        words = [word for word, _ in self._splitter.pre_tokenize_str(text)]
        return spelled_bytes("".join(words)), array("q", accumulate(map(len, words)))


def read_pre_tokenizer(pipeline: str, categories: Categories) -> PreTokenizer:
    """Of a tokenizer.json without vocabulary. Raises what the tokenizers library raises, a plain
    Exception, for text that is none."""
    try:
        data = json.loads(pipeline)
    except (ValueError, RecursionError):
        return _Library(pipeline)
    match data:
        case {"normalizer": None | {"type": "NFC"} as normalizer, "pre_tokenizer": pre_tokenizer}:
            expression = _expression(pre_tokenizer)
            if expression is not None:
                return _Expression(normalizer is not None, expression, categories)
    return _Library(pipeline)


def _expression(pre_tokenizer: Any) -> re.Pattern[str] | None:
    """What cuts words, if nothing else does."""
    match pre_tokenizer:
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}:
            return translated(_GPT2)
        case {
            "type": "Sequence",
            "pretokenizers": [
                {
                    "type": "Split",
                    "pattern": {"Regex": str(pattern)},
                    "behavior": "Isolated",
                    "invert": False,
                },
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        }:
            return translated(pattern)
    return None


def translated(pattern: str) -> re.Pattern[str] | None:
    """Oniguruma's expression as one for texts of characters that stand for their category; None
    for one with other elements than tokenizers' usual ones."""
    parts = []
    position, element = 0, _ELEMENT
    while position < len(pattern):
        found = element.match(pattern, position)
        if found is None:
            return None
        position = found.end()
        groups = found.groupdict()
        within = element is _CLASS_ELEMENT
        if name := groups["property"]:
            part = _PROPERTIES[name] if within else f"[{_PROPERTIES[name]}]"
        elif groups["space"]:
            part = _SPACE if within else f"[{_SPACE}]"
        elif groups.get("other"):
            part = f"[^{_SPACE}]"
        else:
            part = found.group()
        if groups.get("open"):
            element = _CLASS_ELEMENT
        elif groups.get("close"):
            element = _ELEMENT
        parts.append(part)
    try:
        return re.compile("".join(parts))
    except re.error:
        return None
