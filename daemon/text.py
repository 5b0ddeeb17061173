"""Text to token ids and back.

Byte-level BPE through the `tokenizers` library, with the added (control) tokens taken out of it:
plain text can never become a control token, whatever it spells. The chat template's own control
tokens are found by this module, in text where those that came from a message carry a mark.
"""

from __future__ import annotations

import json
import re
import threading
from array import array
from collections.abc import Callable, Mapping
from typing import Any

from emberd.daemon.errors import EmberdError
from tokenizers import Tokenizer as BpeTokenizer

# A lone surrogate cannot occur in valid Unicode text, so no message can hold the mark itself.
MARK = "\udc00"

RECENT_CHARACTERS = 1 << 20  # of texts whose tokens are remembered

THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"


def _byte_of_character() -> dict[str, int]:
    """GPT-2's byte alphabet: printable bytes stand for themselves, the others for U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    return table | {chr(0x100 + i): byte for i, byte in enumerate(others)}


class _RecentTexts:
    """Encodes texts, remembering recent ones: a conversation comes again with every turn."""

    def __init__(self, encode: Callable[[str], list[int]]) -> None:
        self._encode = encode
        self._known: dict[str, array[int]] = {}  # least recently used first
        self._characters = 0
        self._lock = threading.Lock()

    def encode(self, text: str) -> array[int]:
        with self._lock:
            ids = self._known.pop(text, None)
            if ids is not None:
                self._known[text] = ids
                return ids
        ids = array("i", self._encode(text))
        with self._lock:
            if text not in self._known:
                self._known[text] = ids
                self._characters += len(text)
            while self._characters > RECENT_CHARACTERS:
                oldest = next(iter(self._known))
                del self._known[oldest]
                self._characters -= len(oldest)
        return ids


class Tokenizer:
    """A checkpoint's tokenizer.json.

    Attributes:
        added: text of each added token -> id.
        special: ids of the added tokens that never show in text.
    """

    def __init__(self, tokenizer_json: str) -> None:
        """Raises EmberdError where the file is not a byte-level BPE tokenizer."""
        try:
            data = json.loads(tokenizer_json)
            added = data["added_tokens"] or []
            model = data["model"]
            self.added: dict[str, int] = {token["content"]: token["id"] for token in added}
            self.special = frozenset(token["id"] for token in added if token["special"])
            vocabulary: dict[str, int] = model["vocab"]
            kinds = model["type"], (data["decoder"] or {}).get("type")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise EmberdError(f"tokenizer.json: not a tokenizer file ({error!r})") from error
        if kinds != ("BPE", "ByteLevel"):
            raise EmberdError(
                f"tokenizer.json: model {kinds[0]} with decoder {kinds[1]}; "
                "only byte-level BPE is supported"
            )
        for token in added:
            if len(token["content"]) < 2 or any(
                token.get(flag) for flag in ("single_word", "lstrip", "rstrip", "normalized")
            ):
                raise EmberdError(
                    f"tokenizer.json: added token {token['content']!r}: single characters and the "
                    "flags single_word, lstrip, rstrip and normalized are not supported"
                )
        added_ids = set(self.added.values())
        data["added_tokens"] = []
        model["vocab"] = {text: id for text, id in vocabulary.items() if id not in added_ids}
        try:
            self._bpe = BpeTokenizer.from_str(json.dumps(data, ensure_ascii=False))
        except Exception as error:  # the library raises plain Exception
            raise EmberdError(f"tokenizer.json: {error}") from error
        self._pieces: dict[int, str] = {id: text for text, id in model["vocab"].items()}
        self._added_text = {id: text for text, id in self.added.items()}
        self._byte_of = _byte_of_character()
        longest_first = sorted(self.added, key=len, reverse=True)
        self._recent = _RecentTexts(self.encode)
        self._control = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self.think_open = self.added.get(THINK_OPEN)
        self.think_close = self.added.get(THINK_CLOSE)

    def encode(self, text: str) -> list[int]:
        """Plain text: no control tokens, even where it spells one."""
        ids: list[int] = self._bpe.encode(text, add_special_tokens=False).ids
        return ids

    def encode_with_control(self, text: str) -> list[int]:
        """Text of a template or a raw prompt: control tokens count, save those marked."""
        ids: list[int] = []
        position = 0
        for match in self._control.finditer(text):
            ids += self._recent.encode(text[position : match.start()].replace(MARK, ""))
            ids.append(self.added[match.group()])
            position = match.end()
        ids += self._recent.encode(text[position:].replace(MARK, ""))
        return ids

    def begins_with_control(self, text: str) -> bool:
        """Whether the first token of a template's text is a control token."""
        return self._control.match(text) is not None

    def mark(self, text: str, keep: frozenset[str] = frozenset()) -> str:
        """``text`` with a mark inside each control token's literal, except those in ``keep``."""

        def marked(match: re.Match[str]) -> str:
            literal = match.group()
            return literal if literal in keep else literal[0] + MARK + literal[1:]

        while (result := self._control.sub(marked, text)) != text:
            text = result
        return text

    def token_bytes(self, token: int) -> bytes:
        """What a token adds to the answer; nothing for special tokens and unused ids."""
        return b"" if token in self.special else self.literal_bytes(token)

    def literal_bytes(self, token: int) -> bytes:
        """A token's bytes, special tokens spelled out; nothing for unused ids."""
        if token in self._added_text:
            return self._added_text[token].encode()
        return bytes(self._byte_of[character] for character in self._pieces.get(token, ""))


def special_tokens(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """The *_token entries of tokenizer_config.json that chat templates may refer to."""
    found = {}
    for name, value in tokenizer_config.items():
        text = value.get("content") if isinstance(value, Mapping) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found
