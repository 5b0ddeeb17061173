"""The text files of an artifact, checked as the daemon would before they are packed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from emberd.compile.tokenizer import compile_tokenizer
from emberd.daemon.errors import EmberdError
from emberd.daemon.prompt import load_template
from emberd.daemon.vocabulary import VOCABULARY

_COPIED = ("tokenizer_config.json", "generation_config.json", "chat_template.jinja")
_TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class _Folder:
    """See prompt.TextFiles."""

    path: Path

    def has(self, name: str) -> bool:
        return (self.path / name).is_file()

    def read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()


def text_files(folder: Path) -> dict[str, bytes]:
    """The artifact's text files by name, from a checkpoint's; those that it lacks are left out.

    Raises EmberdError where the tokenizer or the chat template cannot be used.
    """
    source = _Folder(folder)
    load_template(source)
    files = {name: source.read(name) for name in _COPIED if source.has(name)}
    if source.has(_TOKENIZER):
        try:
            text = source.read(_TOKENIZER).decode()
        except UnicodeDecodeError as error:
            raise EmberdError(f"{_TOKENIZER}: not UTF-8: {error}") from None
        files[VOCABULARY] = compile_tokenizer(text).to_bytes()
    return files
