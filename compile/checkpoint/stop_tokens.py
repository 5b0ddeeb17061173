"""The tokens at which generation stops."""

from __future__ import annotations

from pathlib import Path

from emberd.compile.checkpoint.configuration import stop_tokens
from emberd.compile.checkpoint.huggingface import (
    GENERATION_CONFIG_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    Checkpoint,
)
from emberd.compile.document import read_json
from emberd.daemon.errors import EmberdError


def find_stop_tokens(checkpoint: Checkpoint) -> list[int]:
    """Every token that any of the checkpoint's files calls an end, the usual first.

    Chat models end a turn with one token and a document with another, and which file names which
    varies; generation must stop at either.
    """
    found: list[int] = []
    generation = checkpoint.folder / GENERATION_CONFIG_FILE
    if generation.is_file():
        found += stop_tokens(read_json(generation))
    found += checkpoint.configuration.stop_tokens
    found += _tokenizer_end(checkpoint.folder)
    last = checkpoint.configuration.dimensions.vocab_size - 1
    for token in found:
        if token > last:
            raise EmberdError(
                f"{checkpoint.folder}: stop token {token} is outside the vocabulary (0..{last})"
            )
    return list(dict.fromkeys(found))


def _tokenizer_end(folder: Path) -> list[int]:
    """The id of tokenizer_config.json's `eos_token`, looked up in tokenizer.json."""
    if not all((folder / file).is_file() for file in (TOKENIZER_FILE, TOKENIZER_CONFIG_FILE)):
        return []
    end = read_json(folder / TOKENIZER_CONFIG_FILE).get("eos_token")
    added = read_json(folder / TOKENIZER_FILE).get("added_tokens")
    if end is None or added is None:
        return []
    text = end["content"].text() if isinstance(end.value, dict) else end.text()
    return [token["id"].integer() for token in added.sequence() if token["content"].text() == text]
