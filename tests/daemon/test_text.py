"""The tokenizer against transformers', with Qwen's real vocabulary."""

from __future__ import annotations

import base64
import importlib.util
import json
import random
from itertools import pairwise
from pathlib import Path

import pytest
from emberd.compile.tokenizer import compile_tokenizer
from emberd.daemon import text as text_module
from emberd.daemon.text import Tokenizer
from needs import needs
from tokenizers.pre_tokenizers import ByteLevel

DEMO = Path(__file__).parents[2] / "firmware_assets" / "demo" / "model"
QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
SCRIPTS = (
    (0x20, 0x7E), (0xA0, 0x17F), (0x300, 0x36F), (0x370, 0x3FF), (0x400, 0x4FF), (0x590, 0x5F4),
    (0x600, 0x6FF), (0x900, 0x97F), (0xE00, 0xE5B), (0x1100, 0x11FF), (0x2000, 0x206F),
    (0x3040, 0x30FF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0x1F300, 0x1F6FF),
)  # fmt: skip


def _split_by_rank(token: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """The two parts of which BPE makes ``token`` last: its merge."""
    parts = [bytes([byte]) for byte in token]
    limit = ranks[token]
    while True:
        pairs = [(ranks.get(a + b, limit), i) for i, (a, b) in enumerate(pairwise(parts))]
        rank, i = min(pairs, default=(limit, 0))
        if rank >= limit:
            return parts
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


@pytest.fixture(scope="module")
def qwen_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen's vocabulary as a checkpoint's tokenizer files."""
    needs("dashscope")
    needs("transformers")
    found = importlib.util.find_spec("dashscope")  # importing it would need what it depends on
    assert found is not None and found.origin is not None
    data = Path(found.origin).with_name("resources").joinpath("qwen.tiktoken").read_bytes()
    ranks = {
        base64.b64decode(token): int(rank) for token, rank in map(bytes.split, data.splitlines())
    }
    assert len(ranks) == 151_643
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {byte: chr(byte) for byte in printable}
    for byte in range(256):
        letters.setdefault(byte, chr(0x100 + len(letters) - len(printable)))
    assert set(letters.values()) == set(ByteLevel.alphabet())

    def spelled(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    merges = [
        [spelled(part) for part in _split_by_rank(token, ranks)]
        for token in sorted(ranks, key=ranks.__getitem__)
        if len(token) > 1
    ]
    layout = {"add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    byte_level = {"type": "ByteLevel", **layout}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    split = {
        "type": "Split", "pattern": {"Regex": QWEN_PATTERN}, "behavior": "Isolated", "invert": False
    }  # fmt: skip
    content = {
        "version": "1.0",
        "added_tokens": [
            {"id": len(ranks) + i, "content": text, "special": "think" not in text, **flags}
            for i, text in enumerate(CONTROL)
        ],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": {spelled(token): rank for token, rank in ranks.items()},
            "merges": [merge for merge in merges if len(merge) == 2],
        },
    }
    folder = tmp_path_factory.mktemp("qwen")
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def _random_text(rng: random.Random) -> str:
    parts = []
    for _ in range(rng.randint(1, 12)):
        low, high = rng.choice(SCRIPTS)
        parts.append("".join(chr(rng.randint(low, high)) for _ in range(rng.randint(1, 8))))
        parts.append(rng.choice(["", " ", "  ", "\n", "\r\n\n", "\t", "'s ", "123 "]))
    return "".join(parts)


def test_qwen_vocabulary_tokenises_as_in_transformers(qwen_folder: Path) -> None:
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(qwen_folder)
    tokenizer = Tokenizer(
        compile_tokenizer((qwen_folder / "tokenizer.json").read_text(encoding="utf-8"))
    )
    rng = random.Random(20261130)
    for _ in range(10_000):
        text = _random_text(rng)
        ids = tokenizer.encode(text)
        assert ids == reference(text, add_special_tokens=False)["input_ids"], text
    ids = tokenizer.encode("数控机床 rattles 🎉")
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == "数控机床 rattles 🎉"
    marked = tokenizer.mark("say <|im_end|> and <think>")
    control = set(tokenizer.added.values())
    assert not control & set(tokenizer.encode_with_control(marked))
    plain = tokenizer.encode("say <|im_end|> and <think>")
    assert tokenizer.encode_with_control(marked) == plain


def test_a_conversation_s_earlier_turns_are_not_encoded_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(text_module, "RECENT_CHARACTERS", 1000)
    tokenizer = Tokenizer(compile_tokenizer((DEMO / "tokenizer.json").read_text(encoding="utf-8")))
    encoded: list[str] = []
    plain = tokenizer._recent._encode

    def counted(text: str) -> list[int]:
        encoded.append(text)
        return plain(text)

    monkeypatch.setattr(tokenizer._recent, "_encode", counted)
    turns = [f"<|im_start|>turn {number}" for number in range(5)]
    first = tokenizer.encode_with_control("".join(turns))
    assert tokenizer.encode_with_control("".join([*turns, "<|im_end|>more"]))[: len(first)] == first
    assert encoded.count("turn 3") == 1 and encoded.count("more") == 1
    for number in range(200):
        text = f"<|im_start|>turn 3<|im_end|>{number} {'x' * number}"
        expected = [i for part in ("turn 3", text[28:]) for i in plain(part)]
        control = set(tokenizer.added.values())
        assert [i for i in tokenizer.encode_with_control(text) if i not in control] == expected
        known = tokenizer._recent._known
        assert sum(map(len, known)) == tokenizer._recent._characters <= 1000
    assert encoded.count("turn 3") == 1
    tokenizer.encode_with_control("y" * 2000)
    assert not tokenizer._recent._known
