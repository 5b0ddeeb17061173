"""Words: cut as the tokenizers library cuts them."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import unicodedata
from array import array
from itertools import pairwise
from typing import Any

import pytest
from emberd.compile.categories import library_categories
from emberd.daemon.pre_tokenizer import (
    Categories,
    _Expression,
    _Library,
    read_pre_tokenizer,
    translated,
)

QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN35 = QWEN.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(
    r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]"
)
LLAMA3 = QWEN.replace(r"\p{N}|", r"\p{N}{1,3}|")
PUNCTUATION = r"\p{P}+|\p{S}|[\p{N}_]+|\S"
EXPRESSIONS = [QWEN, QWEN35, LLAMA3, PUNCTUATION]


def pipeline(expression: str | None, normalizer: str | None = "NFC") -> str:
    """Of a tokenizer that splits by an expression; None: as GPT-2's."""
    byte_level: dict[str, Any] = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": expression is None,
    }
    split = {
        "type": "Split",
        "pattern": {"Regex": expression},
        "behavior": "Isolated",
        "invert": False,
    }
    both = {"type": "Sequence", "pretokenizers": [split, byte_level]}
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": [],
            "normalizer": normalizer and {"type": normalizer},
            "pre_tokenizer": byte_level if expression is None else both,
            "post_processor": None,
            "decoder": None,
            "model": {"type": "BPE", "vocab": {}, "merges": []},
        }
    )


def words(found: tuple[bytes, array[int]]) -> list[bytes]:
    data, ends = found
    return [data[start:end] for start, end in pairwise([0, *ends])]


def check(text: str, expression: str | None, normalizer: str | None = "NFC") -> None:
    given = pipeline(expression, normalizer)
    found = read_pre_tokenizer(given, CATEGORIES)
    assert isinstance(found, _Expression)
    assert words(found.split(text)) == words(_Library(given).split(text)), repr(text)


def _assigned() -> list[str]:
    """Characters that are composed alike by every version of Unicode which we may meet."""
    old = unicodedata.ucd_3_2_0
    return [
        chr(code)
        for code in range(sys.maxunicode + 1)
        if not 0xD800 <= code < 0xE000 and old.category(chr(code)) != "Cn"
    ]


ASSIGNED = _assigned()
EVERYWHERE = [*range(0, 0xD800, 3), *range(0xE000, 0x33480, 3), *range(0x33480, 0x110000, 301)]
CATEGORIES = library_categories()
TRICKY = [*"sStTrReEvVmMlLdD'0123456789aZ \t\r\n-_()$+=", "\u017f", "\u212a", "\u0085", "\u00a0"]
TRICKY += ["\u2028", "\u3000", "\u200d", "\u0301", "\u0661", "\u2167", "\x1c", "\x1f", "\x0b"]
TRICKY += ["\ue000", "\ue004", "\U0001f389", "\U00020000", "e\u0301", "\u1112\u1161\u11ab"]


@pytest.mark.parametrize("expression", [None, *EXPRESSIONS])
@pytest.mark.parametrize("normalizer", [None, "NFC"])
def test_words_of_random_texts_are_the_libraries(
    expression: str | None, normalizer: str | None
) -> None:
    rng = random.Random(0)
    for count in (1, 3, 10, 60):
        for _ in range(100):
            check("".join(rng.choices(TRICKY, k=count)), expression, normalizer)
            mixed = rng.choices(TRICKY, k=count) + rng.choices(ASSIGNED, k=count)
            check("".join(rng.sample(mixed, len(mixed))), expression, normalizer)


@pytest.mark.parametrize("expression", [QWEN35, PUNCTUATION])
def test_every_character_counts_as_it_does_in_the_library(expression: str) -> None:
    check("".join(f"{chr(code)}a{chr(code)} " for code in EVERYWHERE), expression, None)


@pytest.mark.parametrize(
    ("starts", "letters"),
    [
        ([], b""),
        ([1], b"L"),
        ([0, 5, 5], b"LCL"),
        ([0, 5, 4], b"LCL"),
        ([0, 5], b"LCL"),
        ([0], b"X"),
        ([0], b"\xff"),
    ],
)
def test_a_table_that_is_none(starts: list[int], letters: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        Categories(array("i", starts).tobytes(), letters)


@pytest.mark.parametrize(
    "expression",
    [
        r"\p{Lu}+|\S",
        r"\p{Han}+|\S",
        r"\d+|\D",
        r".+",
        r"^a|\S",
        r"(?<=a)b|\S",
        r"(?>a+)|\S",
        r"[\p{L}-]+|\S",
        r"[a&&b]|\S",
        r"[[:alpha:]]|\S",
        r"\p{N}{1,3}+|\S",
        "\u00e9+|\\S",
        r"\b|\S",
        r"[^\S]+",
    ],
)
def test_other_expressions_are_the_librarys(expression: str) -> None:
    assert translated(expression) is None
    given = pipeline(expression)
    assert isinstance(read_pre_tokenizer(given, CATEGORIES), _Library)


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "NFKC"}},
        {
            "pre_tokenizer": {
                "type": "ByteLevel",
                "add_prefix_space": True,
                "trim_offsets": False,
                "use_regex": True,
            }
        },
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Whitespace"}]}},
    ],
)
def test_other_pipelines_are_the_librarys(change: dict[str, Any]) -> None:
    given = json.dumps(json.loads(pipeline(None)) | change)
    assert isinstance(read_pre_tokenizer(given, CATEGORIES), _Library)


def test_unbalanced_expressions_are_the_librarys_to_refuse() -> None:
    assert translated("(a") is None
    for broken in ("{", "[" * 100_000, "{}", pipeline("(a")):
        with pytest.raises(Exception, match=r"."):
            read_pre_tokenizer(broken, CATEGORIES)


def test_serving_needs_no_tokenizers_library() -> None:
    """Of which the daemon would weigh 7 MB more."""
    code = (
        "import sys, emberd.daemon.server.run; from emberd.daemon.pre_tokenizer import *; "
        "read_pre_tokenizer(sys.stdin.read(), Categories(bytes(4), b'L')).split('a\\u00e9'); "
        "sys.exit('tokenizers' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], input=pipeline(QWEN35), text=True, check=True)
