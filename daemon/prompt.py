"""From messages to the tokens of a prompt, with the tokenizer and the template of an artifact.

Whatever a message spells is text: its control tokens' literals are marked before the template sees
them, and only the template's own become control tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from emberd.daemon.artifact import Artifact
from emberd.daemon.errors import EmberdError
from emberd.daemon.template import ChatTemplate
from emberd.daemon.text import THINK_CLOSE, THINK_OPEN, Tokenizer, special_tokens
from emberd.daemon.vocabulary import VOCABULARY, Vocabulary

_THINKING = frozenset({THINK_OPEN, THINK_CLOSE})


class TextFiles(Protocol):
    """The text files of an artifact, or of what will be one."""

    def has(self, name: str) -> bool:
        """Whether there is a file of this name."""

    def read(self, name: str) -> bytes:
        """Its bytes."""


def load_tokenizer(artifact: Artifact) -> Tokenizer:
    """Raises EmberdError where the artifact has none that can be used."""
    if not artifact.has(VOCABULARY):
        raise EmberdError(f"{artifact.path} has no {VOCABULARY}: its model had no tokenizer.json")
    return Tokenizer(Vocabulary.from_bytes(artifact.read(VOCABULARY)))


def load_template(files: TextFiles) -> ChatTemplate | None:
    """chat_template.jinja, else the (default) chat_template of tokenizer_config.json, else None.

    Raises EmberdError where there is one that cannot be used.
    """
    tokenizer_config = read_json(files, "tokenizer_config.json")
    source = _template_source(files, tokenizer_config)
    return None if source is None else ChatTemplate(source, special_tokens(tokenizer_config))


def read_json(files: TextFiles, name: str) -> dict[str, Any]:
    """The object in one of the files, empty where there is no such file.

    Raises EmberdError when the file holds anything else.
    """
    if not files.has(name):
        return {}
    try:
        data = json.loads(_text(files, name))
    except ValueError as error:
        raise EmberdError(f"{name}: not JSON: {error}") from None
    if not isinstance(data, dict):
        raise EmberdError(f"{name}: expected an object")
    return data


def chat_prompt(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
    most: int | None = None,
) -> tuple[list[int], int | None]:
    """The prompt's tokens, and how many of them precede the generation prompt (None: unknown).

    Only before a control token can a text be cut without changing its tokens. `variables` are
    those of the template. Raises TemplateRefusal, and TooManyTokens as
    Tokenizer.encode_with_control does.
    """
    marked = [_mark_message(tokenizer, message) for message in messages]
    names = {name: _mark(tokenizer, value) for name, value in variables.items()}
    text, history = (template.render(marked, prompt, names) for prompt in (True, False))
    opening = text.removeprefix(history)
    if not 0 < len(opening) < len(text) or not tokenizer.begins_with_control(opening):
        opening = text
    turns = tokenizer.encode_with_control(text[: len(text) - len(opening)], most)
    return turns + tokenizer.encode_with_control(opening, most), len(turns) or None


def _mark(tokenizer: Tokenizer, value: Any, keep: frozenset[str] = frozenset()) -> Any:
    """``value`` with every control token's literal in its strings marked as plain text."""
    if isinstance(value, str):
        return tokenizer.mark(value, keep)
    if isinstance(value, list):
        return [_mark(tokenizer, item, keep) for item in value]
    if isinstance(value, dict):
        return {tokenizer.mark(name): _mark(tokenizer, item, keep) for name, item in value.items()}
    return value


def _mark_message(tokenizer: Tokenizer, message: Mapping[str, Any]) -> dict[str, Any]:
    """Templates look for the thinking inside an assistant's content: its tags stay."""
    keep = _THINKING if message["role"] == "assistant" else frozenset()
    return {
        name: _mark(tokenizer, value, keep if name == "content" else frozenset())
        for name, value in message.items()
    }


def _text(files: TextFiles, name: str) -> str:
    try:
        return files.read(name).decode()
    except UnicodeDecodeError as error:
        raise EmberdError(f"{name}: not UTF-8: {error}") from None


def _template_source(files: TextFiles, tokenizer_config: Mapping[str, Any]) -> str | None:
    if files.has("chat_template.jinja"):
        return _text(files, "chat_template.jinja")
    source = tokenizer_config.get("chat_template")
    if isinstance(source, list):
        named = {item.get("name"): item.get("template") for item in source}
        source = named.get("default")
    return source if isinstance(source, str) else None
