"""Text to token ids and back.

Byte-level BPE, with the added (control) tokens kept apart from it: plain text can never become a
control token, whatever it spells. The chat template's own control tokens are found by this module,
in text where those that came from a message carry a mark.
"""

from __future__ import annotations

import re
import threading
from array import array
from collections.abc import Callable, Mapping
from typing import Any

from emberd.daemon.errors import EmberdError
from emberd.daemon.vocabulary import Vocabulary

# A lone surrogate cannot occur in valid Unicode text, so no message can hold the mark itself.
MARK = "\udc00"

RECENT_CHARACTERS = 1 << 20  # of texts whose tokens are remembered

THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"


class TooManyTokens(EmberdError):  # noqa: N818
    """A text that is too long, however it is tokenised."""


class _RecentTexts:
    """Encodes texts, remembering recent ones: a conversation comes again with every turn."""

    def __init__(self, encode: Callable[[str], array[int]]) -> None:
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
        ids = self._encode(text)
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
    """A vocabulary, and control tokens in the texts that may have them.

    Attributes:
        added: text of each added token -> id.
        special: ids of the added tokens that never show in text.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self.added = {token.text: token.id for token in vocabulary.added}
        self.special = frozenset(token.id for token in vocabulary.added if token.special)
        self._literal = {id: text.encode() for text, id in self.added.items()}
        self._shown = self._literal | dict.fromkeys(self.special, b"")
        longest_first = sorted(self.added, key=len, reverse=True)
        self._recent = _RecentTexts(vocabulary.encode)
        self._control = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self.think_open = self.added.get(THINK_OPEN)
        self.think_close = self.added.get(THINK_CLOSE)

    def encode(self, text: str) -> list[int]:
        """Plain text: no control tokens, even where it spells one."""
        return list(self._vocabulary.encode(text))

    def encode_with_control(self, text: str, most: int | None = None) -> list[int]:
        """Text of a template or a raw prompt: control tokens count, save those marked.

        Raises TooManyTokens, before any work, where its length alone makes more than `most`.
        """
        fewest = self._fewest(text)
        if most is not None and fewest > most:
            raise TooManyTokens(
                f"the prompt has {len(text)} characters, which make at least {fewest} tokens, but "
                f"the context is {most} tokens"
            )
        ids: list[int] = []
        position = 0
        for match in self._control.finditer(text):
            ids += self._recent.encode(text[position : match.start()].replace(MARK, ""))
            ids.append(self.added[match.group()])
            position = match.end()
        ids += self._recent.encode(text[position:].replace(MARK, ""))
        return ids

    def _fewest(self, text: str) -> int:
        """So many tokens a text has at least."""
        longest = self._vocabulary.longest
        return -(-(len(text) - text.count(MARK)) // longest) if longest else 0

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
        added = self._shown.get(token)
        return self._vocabulary.piece(token) if added is None else added

    def literal_bytes(self, token: int) -> bytes:
        """A token's bytes, special tokens spelled out; nothing for unused ids."""
        added = self._literal.get(token)
        return self._vocabulary.piece(token) if added is None else added


def special_tokens(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """The *_token entries of tokenizer_config.json that chat templates may refer to."""
    found = {}
    for name, value in tokenizer_config.items():
        text = value.get("content") if isinstance(value, Mapping) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found
