"""Compiling tokenizers: the same tokens as the library that reads tokenizer.json, or a refusal."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from emberd.compile.tokenizer import compile_tokenizer
from emberd.daemon.errors import EmberdError
from emberd.daemon.pre_tokenizer import ALPHABET
from tokenizers import Tokenizer as Reference

DEMO = Path(__file__).parents[2] / "firmware_assets" / "demo" / "model"
LETTERS = "abc"


@pytest.fixture(scope="module")
def demo() -> dict[str, Any]:
    data: dict[str, Any] = json.loads((DEMO / "tokenizer.json").read_text(encoding="utf-8"))
    return data


def _random_tokenizer(rng: random.Random, as_text: bool) -> str:
    """Byte-level BPE with merges of a few letters, in an order that training would not give."""
    vocabulary = {character: 255 - i for i, character in enumerate(sorted(ALPHABET))}
    merges: list[tuple[str, str]] = []
    pieces = list(LETTERS)
    while len(merges) < 60:
        left, right = rng.choice(pieces), rng.choice(pieces)
        if len(left + right) <= 6 and (left, right) not in merges:
            merges.append((left, right))
            pieces.append(left + right)
    rng.shuffle(merges)
    for merge in merges:
        vocabulary.setdefault("".join(merge), len(vocabulary))
    layout = {"add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    byte_level = {"type": "ByteLevel", **layout}
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": [],
            "normalizer": None,
            "pre_tokenizer": byte_level,
            "post_processor": None,
            "decoder": byte_level,
            "model": {
                "type": "BPE",
                "vocab": vocabulary,
                "merges": [" ".join(m) for m in merges] if as_text else merges,
            },
        }
    )


@pytest.mark.parametrize("seed", range(8))
def test_random_merges_make_the_same_tokens(seed: int) -> None:
    rng = random.Random(seed)
    text = _random_tokenizer(rng, as_text=seed % 2 == 0)
    reference, vocabulary = Reference.from_str(text), compile_tokenizer(text)
    for length in (0, 1, 2, 3, 10, 100, 5000):
        sample = "".join(rng.choice(LETTERS + " ") for _ in range(length))
        for given in (sample, sample.replace(" ", ""), "a" * length, "ab" * length):
            ids = list(vocabulary.encode(given))
            assert ids == reference.encode(given).ids
            assert b"".join(map(vocabulary.piece, ids)).decode() == given


def test_a_word_without_end_is_no_trap() -> None:
    vocabulary = compile_tokenizer(_random_tokenizer(random.Random(1), as_text=False))
    word = "".join(random.Random(2).choices(LETTERS, k=400_000))
    assert b"".join(map(vocabulary.piece, vocabulary.encode(word))).decode() == word


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"added_tokens": [], "model": {"type": "BPE"}}', "[" * 100_000]
)
def test_other_files_are_not_tokenizers(text: str) -> None:
    with pytest.raises(EmberdError, match=r"tokenizer\.json: not a tokenizer file"):
        compile_tokenizer(text)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"decoder": {"type": "WordPiece"}}, "BPE with decoder WordPiece"),
        ({"decoder": None}, "BPE with decoder None"),
        ({"added_tokens": [{"id": 1, "content": "x", "special": True}]}, "'x': single characters"),
        (
            {"added_tokens": [{"id": 1, "content": "<x>", "special": True, "lstrip": True}]},
            "'<x>'.*lstrip",
        ),
        ({"pre_tokenizer": {"type": "Nothing"}}, r"tokenizer\.json: "),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "pre-tokenizer is not byte-level"),
    ],
)
def test_tokenizers_of_another_kind_are_refused(
    demo: dict[str, Any], change: dict[str, Any], reason: str
) -> None:
    compile_tokenizer(json.dumps(demo))
    with pytest.raises(EmberdError, match=reason):
        compile_tokenizer(json.dumps(demo | change))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"ignore_merges": True}, "the option ignore_merges of BPE"),
        ({"unk_token": "a"}, "the option unk_token of BPE"),
        ({"merges": [["a", "nowhere"]]}, r"tokenizer\.json: "),
        ({"merges": ["a"]}, r"tokenizer\.json: "),
    ],
)
def test_options_of_another_kind_are_refused(
    demo: dict[str, Any], change: dict[str, Any], reason: str
) -> None:
    with pytest.raises(EmberdError, match=reason):
        compile_tokenizer(json.dumps(demo | {"model": demo["model"] | change}))
