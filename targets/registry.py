"""The targets emberc can compile for: one YAML file a target, beside this module."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from emberd.daemon.errors import EmberdError
from emberd.daemon.policies import followed

HOST = "host"

_FIELDS = {"name": str, "machine": str, "isas": list, "expert_policy": str}


class UnknownTargetError(ValueError):
    """No target of that name, or none for this machine; the message lists those that exist."""


@dataclass(frozen=True)
class Target:
    """What emberc has to know about a family of devices.

    `isas` names instruction-set levels (compile/isa), best first; an artifact carries one kernel
    library for each, and the device loads the first one that its CPU can run. `expert_policy` names
    which experts the daemon keeps in memory (daemon/policies.py), unless its settings name another.
    """

    name: str
    machine: str
    isas: tuple[str, ...]
    expert_policy: str


def load_target(path: Path) -> Target:
    """Read one target file. Raises ValueError naming the file and the field that is wrong."""
    data: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(data, dict) or data.keys() != _FIELDS.keys():
        raise ValueError(f"{path}: a target has exactly the fields {', '.join(_FIELDS)}")
    for field, kind in _FIELDS.items():
        if not isinstance(data[field], kind) or not data[field]:
            raise ValueError(f"{path}: field {field!r} must be a non-empty {kind.__name__}")
    try:
        followed(data["expert_policy"])
    except EmberdError as error:
        raise ValueError(f"{path}: field 'expert_policy': {error}") from None
    return Target(data["name"], data["machine"], tuple(data["isas"]), data["expert_policy"])


def targets() -> dict[str, Target]:
    """All targets by name."""
    loaded = [load_target(path) for path in sorted(Path(__file__).parent.glob("*.yaml"))]
    return {target.name: target for target in loaded}


def find_target(name: str) -> Target:
    """The target called `name`; `host` is the one of this machine. Raises UnknownTargetError."""
    known = targets()
    if name == HOST:
        machine = platform.machine()
        for target in known.values():
            if target.machine == machine:
                return target
        raise UnknownTargetError(
            f"no target for this machine ({machine}); known targets: {', '.join(known)}"
        )
    if name not in known:
        raise UnknownTargetError(f"unknown target {name!r}; known: {HOST}, {', '.join(known)}")
    return known[name]
