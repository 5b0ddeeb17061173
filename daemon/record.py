"""Maps read from a file, member by member: whatever is not as it must be is named."""

from __future__ import annotations

from typing import Any

from emberd.daemon.errors import EmberdError

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1


class Record:
    """A map of a file. Reading a member raises EmberdError with the file and the member's name.

    Args:
        value: the map, if it is one.
        file: what errors call the file.
        path: of the map in the file, empty at the top.
    """

    def __init__(self, value: Any, file: str, path: str = "") -> None:
        if not isinstance(value, dict):
            raise EmberdError(f"{file}: {path or 'the top level'} is not a map")
        self.members: dict[Any, Any] = value
        self._file = file
        self._path = path

    def name(self, member: str) -> str:
        """How errors call a member."""
        return f"{self._file}: {self._path}.{member}" if self._path else f"{self._file}: {member}"

    def record(self, member: str) -> Record:
        """A map inside this one."""
        return Record(self.members.get(member), self._file, self._inner(member))

    def records(self, member: str) -> list[Record]:
        """A list of maps."""
        items = enumerate(self.elements(member))
        return [Record(item, self._file, self._inner(f"{member}[{i}]")) for i, item in items]

    def string(self, member: str) -> str:
        return self._string(self.members.get(member), member)

    def strings(self, member: str) -> tuple[str, ...]:
        items = enumerate(self.elements(member))
        return tuple(self._string(item, f"{member}[{i}]") for i, item in items)

    def integer(self, member: str, low: int, high: int) -> int:
        """An integer in [low, high]."""
        return self._integer(self.members.get(member), member, low, high)

    def integers(self, member: str, low: int, high: int) -> tuple[int, ...]:
        """A list of integers in [low, high]."""
        items = enumerate(self.elements(member))
        return tuple(self._integer(item, f"{member}[{i}]", low, high) for i, item in items)

    def elements(self, member: str) -> list[Any]:
        """A list, whatever is in it."""
        value = self.members.get(member)
        if not isinstance(value, list):
            raise EmberdError(f"{self.name(member)} is not a list")
        return value

    def packed(self, member: str, unit: int) -> bytes:
        """Bytes that hold entries of ``unit`` bytes."""
        value = self.members.get(member)
        if not isinstance(value, bytes) or len(value) % unit:
            raise EmberdError(f"{self.name(member)} is not a packed table of {unit}-byte entries")
        return value

    def _inner(self, member: str) -> str:
        return f"{self._path}.{member}" if self._path else member

    def _string(self, value: Any, member: str) -> str:
        if not isinstance(value, str):
            raise EmberdError(f"{self.name(member)} is not a string")
        return value

    def _integer(self, value: Any, member: str, low: int, high: int) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise EmberdError(
                f"{self.name(member)} is {value!r:.80}, expected an integer from {low} to {high}"
            )
        return value
