"""From sampled tokens to the text of an answer, piece by piece.

Whatever the tokens' borders, the pieces put together are the same text: characters are held back
until whole, and anything that may become a stop string is held back until it cannot.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import NamedTuple

from emberd.daemon.text import Tokenizer


class Utf8Stream:
    """Bytes in, whole characters out.

    A character's bytes are kept until it is complete; bytes that can never be part of one are
    dropped, and so is a character that the stream's end leaves incomplete.
    """

    def __init__(self) -> None:
        self._rest = b""  # of a character that is not complete

    def push(self, data: bytes) -> str:
        data = self._rest + data
        text, used = codecs.utf_8_decode(data, "ignore")
        self._rest = data[used:]
        return text


class StopSearch:
    """Ends a text before the stop string that completes first (at a tie, the longest)."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """The text that is now certain to precede any stop string."""
        if self.found:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        matches = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if matches:
            self.found, self._held = True, ""
            return text[: min(matches)[1]]
        keep = max((self._overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """The text held back, once it is known that no more will come."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest end of ``text`` that begins ``stop``."""
        longest = min(len(text), len(stop) - 1)
        return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


class Piece(NamedTuple):
    """A part of an answer: either may be empty."""

    content: str = ""
    reasoning: str = ""

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning)


class Answer:
    """The text of one answer, its thinking apart.

    Args:
        thinking: True if the prompt opened the thinking, False if it did not, None if thinking
            is not to be told from the rest (raw completions).
        stops: stop strings; they end the content, never the thinking.
    """

    def __init__(
        self, tokenizer: Tokenizer, stops: Sequence[str] = (), thinking: bool | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._splits = thinking is not None
        self.thinking = bool(thinking)
        self._search = StopSearch(stops)
        self._decoder = Utf8Stream()
        self._newlines = ""  # of the thinking, kept until more of it follows
        self._at_start = True  # of the thinking, or of the content after it: newlines are layout
        self._strip_content = False
        self.content_length = 0
        """Characters of content decoded so far, those held back included."""

    @property
    def stopped(self) -> bool:
        """A stop string was found: the answer is complete."""
        return self._search.found

    def push(self, token: int) -> Piece:
        """The piece that ``token`` makes certain."""
        if self._splits and token == self._tokenizer.think_open:
            self._switch(thinking=True)
            return Piece(content=self._search.finish())
        if self._splits and token == self._tokenizer.think_close:
            self._strip_content = self.thinking
            self._switch(thinking=False)
            return Piece()
        text = self._decoder.push(self._tokenizer.token_bytes(token))
        return Piece(reasoning=self._reasoning(text)) if self.thinking else self._content(text)

    def finish(self) -> Piece:
        """What was held back, at the end of an answer that no stop string ended."""
        return Piece(content=self._search.finish())

    def _switch(self, thinking: bool) -> None:
        self.thinking = thinking
        self._decoder, self._newlines, self._at_start = Utf8Stream(), "", True

    def _reasoning(self, text: str) -> str:
        text = self._newlines + text
        if self._at_start:
            text = text.lstrip("\n")
        body = text.rstrip("\n")
        self._newlines = text[len(body) :]
        self._at_start = self._at_start and not body
        return body

    def _content(self, text: str) -> Piece:
        if self._strip_content and self._at_start:
            text = text.lstrip("\n")
        self._at_start = self._at_start and not text
        self.content_length += len(text)
        return Piece(content=self._search.push(text))
