"""The daemon's configuration: a YAML mapping of the fields of `Config`."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from emberd.daemon.errors import EmberdError
from emberd.daemon.policies import followed
from emberd.daemon.sizes import read_size


@dataclass(frozen=True)
class Config:
    """Settings of `emberd serve`; command line options win over the file.

    Attributes:
        host, port: where to listen; port 0 takes any free one.
        slots: conversations held, and requests answered, at the same time.
        context: tokens per slot, prompt and answer together; 0 means what the model allows.
        threads: of the native core; 0 means one per physical core.
        expert_budget: bytes of memory for experts, or a size such as 6G; the others are read
            from the disk as they are needed. Negative means that all are mapped.
        reader_threads: that read those.
        expert_policy: which of them stay in memory (see policies.POLICIES); empty means what the
            artifact's target prefers.
        routing_margin: how much routing weight (a token's experts have 1 in all) a choice may lose
            by taking an expert in memory in place of a missing one, which changes answers.
        stall_deadline: milliseconds that a token may wait for those; then missing experts whose
            routing weight is below stall_weight are skipped, which changes answers. 0: none are.
        stall_weight: see there.
        max_queue: requests that may wait for a slot; more get 429.
        max_body_bytes: largest request body, in bytes or with a unit such as 8M; more gets 413.
        keep_alive: how long an idle model stays in memory: seconds, or a text such as "5m";
            negative means for ever. Unloading it forgets the conversations in its slots.
        drain_seconds: how long requests may still run after SIGTERM.
        api_key: if not empty, requests must carry it as a bearer token, or as the password of
            HTTP Basic.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    slots: int = 2
    context: int = 0
    threads: int = 0
    expert_budget: int = -1
    reader_threads: int = 4
    expert_policy: str = ""
    routing_margin: float = 0.0
    stall_deadline: float = 0.0
    stall_weight: float = 0.05
    max_queue: int = 32
    max_body_bytes: int = 8 << 20
    keep_alive: float = -1.0
    drain_seconds: float = 30.0
    api_key: str = ""


_HUGE = 2**1000  # floats go a little further
RANGES: dict[str, tuple[float, float]] = {
    "port": (0, 65535),
    "slots": (1, 256),
    "context": (0, 1 << 24),
    "threads": (0, 256),
    "expert_budget": (-1, 1 << 62),
    "reader_threads": (1, 64),
    "routing_margin": (0, 1),
    "stall_deadline": (0, 60_000),
    "stall_weight": (0, 1),
    "max_queue": (0, 1 << 16),
    "max_body_bytes": (1 << 10, 1 << 30),
    "keep_alive": (-1e9, 1e9),
    "drain_seconds": (0, 86400),
}
_UNITS = {"s": 1, "m": 60, "h": 3600}


def load(path: Path | None, overrides: dict[str, Any]) -> Config:
    """The file's settings, then those of ``overrides`` that are not None.

    Raises EmberdError naming the file and the setting at fault. An empty file is at fault too: it
    is one that an editor still writes, or that a power cut left, and the defaults have neither its
    key nor its budget.
    """
    settings = {} if path is None else _read(path)
    settings |= {name: value for name, value in overrides.items() if value is not None}
    where = "configuration" if path is None else str(path)
    known = {field.name: type(field.default) for field in fields(Config)}
    for name, value in settings.items():
        if name not in known:
            raise EmberdError(f"{where}: unknown setting {name!r}; settings are {', '.join(known)}")
        settings[name] = _checked(f"{where}: {name}", name, value, known[name])
    return replace(Config(), **settings)


def _read(path: Path) -> dict[str, Any]:
    import yaml  # 15 ms that a daemon without a file saves

    try:
        text = path.read_text(encoding="utf-8")
        data = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        raise EmberdError(f"{path}: cannot be read: {error}") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: 2026-99-99, or 5000 digits
        raise EmberdError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise EmberdError(f"{path}: nested too deep for settings such as 'port: 8080'") from None
    if not text.strip():
        raise EmberdError(f"{path}: empty; for the defaults write {{}}, or a comment (#) alone")
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise EmberdError(f"{path}: expected settings such as 'port: 8080'")
    return data


def _checked(where: str, name: str, value: Any, kind: type[Any]) -> Any:
    if kind is float and isinstance(value, str):
        with suppress(ValueError):
            value = float(value)  # 1e3, which is text in YAML 1.1
    if name == "keep_alive" and isinstance(value, str):
        value = _seconds(where, value)
    if name in ("expert_budget", "max_body_bytes") and isinstance(value, str):
        value = _bytes(where, value)
    if kind is float and type(value) is int:
        value = float(value) if abs(value) < _HUGE else math.inf  # which no range has
    if not isinstance(value, kind) or isinstance(value, bool):
        raise EmberdError(f"{where}: expected {kind.__name__}, not {value!r}")
    if isinstance(value, str) and not value.isprintable():
        raise EmberdError(f"{where}: expected printable characters, not {value!r:.80}")
    if name == "host" and not value:
        raise EmberdError(f"{where}: empty; write 0.0.0.0 to listen on every interface")
    if name == "expert_budget" and not -1 <= value <= RANGES[name][1]:
        raise EmberdError(
            f"{where}: expected the bytes of memory for experts, a size such as '6G', or -1 to map "
            f"all of them, not {value!r:.80}"
        )
    if name == "expert_policy":
        _check_policy(where, value)
    if name in RANGES:
        low, high = RANGES[name]
        if not low <= value <= high:  # so NaN
            raise EmberdError(f"{where}: expected {low:g} to {high:g}, not {value!r:.80}")
    return value


def _check_policy(where: str, name: str) -> None:
    try:
        followed(name)
    except EmberdError as error:
        raise EmberdError(f"{where}: {error}") from None


def _seconds(where: str, text: str) -> float:
    """Of a duration such as 90s, 5m or 1.5h."""
    try:
        return float(text[:-1]) * _UNITS[text[-1:]]
    except (ValueError, KeyError):
        raise EmberdError(
            f"{where}: expected seconds, or a number with s, m or h such as '5m', not {text!r}"
        ) from None


def _bytes(where: str, text: str) -> int:
    try:
        return read_size(text)
    except EmberdError as error:
        raise EmberdError(f"{where}: {error}") from None
