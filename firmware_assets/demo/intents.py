"""The command classes: what can be asked, how it may be said and how it is answered.

The texts live in ``phrases.yaml``: for every intent and follow-up, in English and Chinese,
templates for training and held-out ones that training never renders.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

CLASSES = ("navigation", "climate", "media", "diagnosis")

# JSON field of a slot, where it is not the slot's own name
FIELDS = {"fan_level": "level", "seat_level": "level"}

_TEXTS: dict[str, Any] = yaml.safe_load(
    Path(__file__).with_name("phrases.yaml").read_text(encoding="utf-8")
)

# slot -> canonical value -> language -> how it is said; the first way is the one answers use
ENUMS: dict[str, dict[str, dict[str, list[str]]]] = _TEXTS["values"]

# action -> language -> sentence
REPLIES: dict[str, dict[str, str]] = _TEXTS["replies"]


@dataclass(frozen=True)
class Phrases:
    """Paraphrase templates of one request in one language."""

    train: tuple[str, ...]
    heldout: tuple[str, ...]


@dataclass(frozen=True)
class Intent:
    """A request that stands alone: its action and the slots that its templates must fill."""

    action: str
    slots: tuple[str, ...]
    defaults: dict[str, str]
    phrases: dict[str, Phrases]
    training_weight: int  # how often training draws it, relative to its class's other intents

    @property
    def command_class(self) -> str:
        return self.action.split(".")[0]


def _without_macros(template: str) -> str:
    for name, text in _TEXTS["macros"].items():
        template = template.replace(f"<{name}>", text)
    return template


def _phrases(entry: dict[str, Any]) -> dict[str, Phrases]:
    """The phrases of an entry of the text file, by language."""
    return {
        language: Phrases(
            tuple(map(_without_macros, entry[language]["train"])),
            tuple(map(_without_macros, entry[language]["heldout"])),
        )
        for language in ("en", "zh")
    }


INTENTS = tuple(
    Intent(
        entry["action"],
        tuple(entry["slots"]),
        entry.get("defaults", {}),
        _phrases(entry),
        entry.get("training_weight", 1),
    )
    for entry in _TEXTS["intents"]
)

FOLLOWUP_PHRASES = {name: _phrases(entry) for name, entry in _TEXTS["followups"].items()}
