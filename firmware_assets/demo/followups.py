"""Follow-up requests: short turns that make sense only together with the turn before them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from intents import ENUMS, FOLLOWUP_PHRASES, Phrases
from values import OPEN_SLOTS, Language, Split, Value, is_heldout

Slots = dict[str, Value]


@dataclass(frozen=True)
class Resolved:
    """What a follow-up means: its action, that action's slots, and the slots the user speaks."""

    action: str
    slots: Slots
    spoken: Slots


Resolve = Callable[[Slots, random.Random, Split, Language], "Resolved | None"]


@dataclass(frozen=True)
class Followup:
    """A follow-up request that may come after any of the actions in ``after``."""

    name: str
    after: tuple[str, ...]
    resolve: Resolve

    @property
    def phrases(self) -> dict[str, Phrases]:
        return FOLLOWUP_PHRASES[self.name]


def _shift(action: str, slot: str, bounds: tuple[float, float], *steps: int) -> Resolve:
    """Move the numeric ``slot`` of the previous turn by one of ``steps``, spoken as ``{n}``."""

    def resolve(
        before: Slots, rng: random.Random, split: Split, language: Language
    ) -> Resolved | None:
        del language
        step = rng.choice(steps)
        value = float(before[slot]) + step
        moved: Value = int(value) if value.is_integer() else value
        if not bounds[0] <= value <= bounds[1] or (split == "train" and is_heldout(slot, moved)):
            return None
        return Resolved(action, {**before, slot: moved}, {"n": abs(step)})

    return resolve


def _swap(action: str, slot: str) -> Resolve:
    """Repeat the previous request with another value of ``slot``."""

    def resolve(
        before: Slots, rng: random.Random, split: Split, language: Language
    ) -> Resolved | None:
        if slot in ENUMS:
            fresh: Value = rng.choice([v for v in ENUMS[slot] if v != before.get(slot)])
        else:
            fresh = OPEN_SLOTS[slot](rng, split, language)
        return Resolved(action, {**before, slot: fresh}, {slot: fresh})

    return resolve


def _keep(action: str, *slots: str) -> Resolve:
    """A new action on ``slots`` of the previous turn."""

    def resolve(
        before: Slots, rng: random.Random, split: Split, language: Language
    ) -> Resolved | None:
        del rng, split, language
        if not all(slot in before for slot in slots):
            return None
        return Resolved(action, {slot: before[slot] for slot in slots}, {})

    return resolve


def _add(action: str, slot: str, *kept: str) -> Resolve:
    """A new action on ``kept`` slots of the previous turn and one newly spoken ``slot``."""

    def resolve(
        before: Slots, rng: random.Random, split: Split, language: Language
    ) -> Resolved | None:
        swapped = _swap(action, slot)(before, rng, split, language)
        if swapped is None:
            return None
        slots = {name: swapped.slots[name] for name in (*kept, slot)}
        return Resolved(action, slots, swapped.spoken)

    return resolve


def _same_for_machine(
    before: Slots, rng: random.Random, split: Split, language: Language
) -> Resolved | None:
    """The previous diagnosis request, for another machine."""
    kind = "lookup" if "code" in before else "read" if "sensor" in before else "status"
    return _swap(f"diagnosis.{kind}", "machine")(before, rng, split, language)


DEGREES, PERCENT, FAN_LEVELS = (10, 39), (0, 100), (1, 7)

# action that can be cancelled -> the slot that tells what was cancelled
CANCELLED_SLOT = {
    "navigation.start": "destination",
    "navigation.find": "category",
    "climate.set": "zone",
    "climate.seat": "seat",
    "climate.defrost": "window",
    "media.play": "title",
    "media.radio": "frequency",
    "diagnosis.lookup": "machine",
    "diagnosis.status": "machine",
    "diagnosis.read": "machine",
    "diagnosis.inspect": "machine",
    "diagnosis.history": "machine",
}

FOLLOWUPS: tuple[Followup, ...] = (
    Followup("warmer", ("climate.set",), _shift("climate.set", "temperature", DEGREES, 1)),
    Followup("cooler", ("climate.set",), _shift("climate.set", "temperature", DEGREES, -1)),
    Followup("warmer_by", ("climate.set",), _shift("climate.set", "temperature", DEGREES, 2, 3, 4)),
    Followup(
        "cooler_by", ("climate.set",), _shift("climate.set", "temperature", DEGREES, -2, -3, -4)
    ),
    Followup("same_zone", ("climate.set",), _swap("climate.set", "zone")),
    Followup("fan_up", ("climate.fan",), _shift("climate.fan", "fan_level", FAN_LEVELS, 1)),
    Followup("fan_down", ("climate.fan",), _shift("climate.fan", "fan_level", FAN_LEVELS, -1)),
    Followup("same_seat", ("climate.seat",), _swap("climate.seat", "seat")),
    Followup("avoid", ("navigation.start",), _swap("navigation.start", "avoid")),
    Followup("add_stop", ("navigation.start",), _add("navigation.stop", "stop", "destination")),
    Followup("eta", ("navigation.start",), _keep("navigation.eta", "destination")),
    Followup("go_there", ("navigation.find",), _keep("navigation.go", "category")),
    Followup("again", ("media.play",), _keep("media.repeat", "title")),
    Followup("same_artist", ("media.play",), _keep("media.artist", "artist")),
    Followup("louder", ("media.volume",), _shift("media.volume", "volume", PERCENT, 5)),
    Followup("quieter", ("media.volume",), _shift("media.volume", "volume", PERCENT, -5)),
    Followup(
        "louder_by",
        ("media.volume",),
        _shift("media.volume", "volume", PERCENT, 1, 2, 3, 4, 6, 7, 8, 9, 10),
    ),
    Followup(
        "quieter_by",
        ("media.volume",),
        _shift("media.volume", "volume", PERCENT, -1, -2, -3, -4, -6, -7, -8, -9, -10),
    ),
    Followup("reset", ("diagnosis.lookup",), _keep("diagnosis.reset", "machine", "code")),
    Followup(
        "other_machine",
        ("diagnosis.lookup", "diagnosis.read", "diagnosis.status"),
        _same_for_machine,
    ),
    Followup(
        "other_sensor",
        ("diagnosis.read", "diagnosis.status", "diagnosis.inspect"),
        _add("diagnosis.read", "sensor", "machine"),
    ),
    Followup(
        "last_hours",
        ("diagnosis.lookup", "diagnosis.status", "diagnosis.read", "diagnosis.inspect"),
        _add("diagnosis.history", "hours", "machine"),
    ),
    Followup(
        "stop_machine",
        ("diagnosis.inspect", "diagnosis.lookup"),
        _keep("diagnosis.stop", "machine"),
    ),
    *(
        Followup("cancel", (action,), _keep(action.split(".")[0] + ".cancel", slot))
        for action, slot in CANCELLED_SLOT.items()
    ),
)
