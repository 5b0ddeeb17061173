"""Typed access to parsed JSON and YAML: every wrong value is reported with its file and place."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import yaml
from emberd.daemon.errors import EmberdError

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True)
class Node:
    """A value of a document and where it stands; every accessor raises EmberdError if it can't."""

    file: Path
    place: str
    value: Any

    def fail(self, expected: str) -> NoReturn:
        """Raise an error that names the file, the place, what was expected and what was found."""
        found = repr(self.value)
        if len(found) > 80:
            found = found[:77] + "..."
        place = f"{self.place}: " if self.place else ""
        raise EmberdError(f"{self.file}: {place}expected {expected}, found {found}")

    def __getitem__(self, key: str) -> Node:
        node = self.get(key)
        if node is None:
            place = f"{self.place}: " if self.place else ""
            raise EmberdError(f"{self.file}: {place}missing key '{key}'")
        return node

    def get(self, key: str) -> Node | None:
        """The value under `key`; None when it is absent or null."""
        if not isinstance(self.value, dict):
            self.fail("a mapping")
        value = self.value.get(key)
        return None if value is None else Node(self.file, self._under(key), value)

    def mapping(self) -> dict[str, Node]:
        if not isinstance(self.value, dict) or not all(isinstance(key, str) for key in self.value):
            self.fail("a mapping from names")
        return {key: Node(self.file, self._under(key), value) for key, value in self.value.items()}

    def sequence(self) -> list[Node]:
        if not isinstance(self.value, list):
            self.fail("a list")
        return [Node(self.file, f"{self.place}[{i}]", value) for i, value in enumerate(self.value)]

    def integer(self, minimum: int = 0, maximum: int = 2**62) -> int:
        value = self.value
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            limits = f"of at least {minimum}" if maximum == 2**62 else f"in {minimum}..{maximum}"
            self.fail(f"an integer {limits}")
        return int(value)

    def number(self, above: float = -math.inf, at_most: float = math.inf) -> float:
        value = self.value
        valid = isinstance(value, int | float) and not isinstance(value, bool)
        if not valid or not math.isfinite(value) or not above < value <= at_most:
            low = "" if above == -math.inf else f" above {above:g}"
            high = "" if at_most == math.inf else f" of at most {at_most:g}"
            self.fail(f"a number{low}{high}")
        return float(value)

    def text(self) -> str:
        if not isinstance(self.value, str) or not self.value:
            self.fail("a string")
        return str(self.value)

    def boolean(self) -> bool:
        if not isinstance(self.value, bool):
            self.fail("true or false")
        return bool(self.value)

    def _under(self, key: str) -> str:
        return f"{self.place}.{key}" if self.place else key


def read_json(file: Path) -> Node:
    """The JSON object in `file`; EmberdError when it cannot be read or is not one."""
    try:
        value = json.loads(_read_text(file))
    except (ValueError, RecursionError) as error:
        raise EmberdError(f"{file}: not valid JSON: {error}") from error
    return _root(file, value)


def read_yaml(file: Path) -> Node:
    """The YAML mapping in `file`; EmberdError when it cannot be read or is not one."""
    try:
        value = yaml.load(_read_text(file), Loader=_Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise EmberdError(f"{file}: not valid YAML: {reason}") from error
    return _root(file, value)


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise EmberdError(f"{file}: not UTF-8 text: {error}") from error
    except OSError as error:
        raise EmberdError(f"{file}: cannot be read: {error.strerror}") from error


def _root(file: Path, value: Any) -> Node:
    node = Node(file, "", value)
    if not isinstance(value, dict):
        node.fail("a mapping")
    return node
