"""The commands to profile: a file of JSON lines, and each as tokens."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from emberd.daemon.artifact import Artifact
from emberd.daemon.errors import EmberdError
from emberd.daemon.prompt import chat_prompt, load_template, load_tokenizer

_MESSAGE_ROLES = ("system", "user", "assistant", "tool")
_NAME_CHARACTERS = 80


@dataclass(frozen=True)
class Command:
    """One line of the file.

    `complete`: the answer is part of the tokens; there is nothing to generate.
    """

    command_class: str
    tokens: array[int]
    complete: bool


class CommandReader:
    """Turns lines {"class": ..., "prompt": TEXT} or {"class": ..., "messages": [...]} into tokens
    as the daemon does: a prompt as it stands, messages through the chat template.

    Messages that end with the assistant's are complete; others get the template's generation
    prompt. Other members of a line are not read. `longest`: tokens that a command may have. Raises
    EmberdError where the artifact has no tokenizer.
    """

    def __init__(self, artifact: Artifact, longest: int) -> None:
        self._tokenizer = load_tokenizer(artifact)
        self._template = load_template(artifact)
        self._longest = longest

    def read(self, path: Path) -> Iterator[Command]:
        """The commands in order. Raises EmberdError naming the line that is not one."""
        try:
            lines = path.read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise EmberdError(f"{path}: cannot be read: {error}") from None
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    yield self._command(line)
                except EmberdError as error:
                    raise EmberdError(f"{path}: line {number}: {error}") from None

    def _command(self, line: str) -> Command:
        try:
            entry = json.loads(line)
            json.dumps(entry, ensure_ascii=False).encode()  # escapes can hide what is no text
        except UnicodeEncodeError:
            raise EmberdError("a lone surrogate, which is not a character") from None
        except (ValueError, RecursionError) as error:
            raise EmberdError(f"not JSON: {error}") from None
        given = set(entry) & {"prompt", "messages"} if isinstance(entry, dict) else set()
        if len(given) != 1:
            raise EmberdError('expected {"class": ..., "prompt": ...} or {..., "messages": ...}')
        name = entry.get("class")
        if not isinstance(name, str) or not 0 < len(name) <= _NAME_CHARACTERS:
            raise EmberdError(f"class: expected a name of up to {_NAME_CHARACTERS} characters")
        if not name.isprintable():
            raise EmberdError(f"class: {name!r} has characters that cannot be shown")
        complete = False
        if "prompt" in entry:
            if not isinstance(entry["prompt"], str):
                raise EmberdError("prompt: expected a string")
            tokens = self._tokenizer.encode_with_control(entry["prompt"])
        else:
            messages = _messages(entry["messages"])
            complete = messages[-1]["role"] == "assistant"
            tokens = self._chat(messages, complete)
        if not 0 < len(tokens) <= self._longest:
            raise EmberdError(f"{len(tokens)} tokens: expected 1 to {self._longest}")
        return Command(name, array("i", tokens), complete)

    def _chat(self, messages: list[dict[str, str]], complete: bool) -> list[int]:
        if self._template is None:
            raise EmberdError("messages, but the artifact has no chat template: give a prompt")
        tokens, boundary = chat_prompt(self._tokenizer, self._template, messages, {})
        return tokens[:boundary] if complete else tokens


def _messages(value: Any) -> list[dict[str, str]]:
    if not isinstance(value, list) or not value:
        raise EmberdError("messages: expected a list of at least one")
    for index, message in enumerate(value):
        if (
            not isinstance(message, dict)
            or set(message) != {"role", "content"}
            or message["role"] not in _MESSAGE_ROLES
            or not isinstance(message["content"], str)
        ):
            raise EmberdError(
                f'messages[{index}]: expected {{"role": ..., "content": TEXT}} with a role of '
                f"{', '.join(_MESSAGE_ROLES)}"
            )
    return value
