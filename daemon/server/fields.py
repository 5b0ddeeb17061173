"""Reading the members of JSON objects: strict about types and ranges, blind to unknown ones."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, TypeVar

from emberd.daemon.server.api_error import ApiError

T = TypeVar("T")
D = TypeVar("D")


def invalid(param: str, problem: str) -> ApiError:
    return ApiError(400, f"{param}: {problem}", param=param, code="invalid_value")


class Fields:
    """A JSON object's members; null counts as absent."""

    def __init__(self, data: dict[str, Any], prefix: str = "") -> None:
        self.data = data
        self._prefix = prefix

    def name(self, name: str) -> str:
        return self._prefix + name

    def get(self, name: str) -> Any:
        return self.data.get(name)

    def integer(self, name: str, low: int, high: int, default: T) -> int | T:
        value = self.data.get(name)
        if value is None:
            return default
        if type(value) is float and value.is_integer() and abs(value) < 2**53:
            value = int(value)
        if type(value) is not int:
            raise invalid(self.name(name), f"expected an integer, not {_shown(value)}")
        if not low <= value <= high:
            raise invalid(self.name(name), f"expected {low} to {high}, not {_shown(value)}")
        return value

    def number(self, name: str, low: float, high: float, default: T) -> float | T:
        value = self.data.get(name)
        if value is None:
            return default
        if type(value) not in (int, float):
            raise invalid(self.name(name), f"expected a number, not {_shown(value)}")
        if not low <= value <= high or not math.isfinite(value):
            raise invalid(self.name(name), f"expected {low:g} to {high:g}, not {_shown(value)}")
        return float(value)

    def boolean(self, name: str, default: bool = False) -> bool:
        return self._typed(name, bool, "true or false", default)

    def string(self, name: str, default: str | None = None) -> str | None:
        return self._typed(name, str, "a string", default)

    def object(self, name: str) -> Fields:
        data: dict[str, Any] = self._typed(name, dict, "an object", {})
        return Fields(data, f"{self.name(name)}.")

    def refuse(self, name: str, reason: str, allowed: Callable[[Any], bool]) -> None:
        """400 with the reason, unless the member is absent or ``allowed``."""
        value = self.data.get(name)
        if value is not None and not allowed(value):
            raise ApiError(400, f"{self.name(name)}: {reason}", param=name, code="unsupported")

    def _typed(self, name: str, kind: type[T], text: str, default: D) -> T | D:
        value = self.data.get(name)
        if value is None:
            return default
        if not isinstance(value, kind):
            raise invalid(self.name(name), f"expected {text}, not {_shown(value)}")
        return value


def _shown(value: Any) -> str:
    """A value short enough for a message."""
    if type(value) is int and abs(value) >= 10**20:
        return "so large a number"
    text = json.dumps(value, ensure_ascii=False) if not isinstance(value, dict | list) else ""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    return text if len(text) <= 60 else text[:57] + "..."
