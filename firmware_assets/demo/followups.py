"""Follow-up requests: short turns that make sense only together with the turn before them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from intents import ENUMS, FOLLOWUP_PHRASES, Phrases
from values import OPEN_SLOTS, Language, Split, Value

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


def _adjust(action: str, kept: tuple[str, ...], *steps: int) -> Resolve:
    """Change what the previous turn set by one of ``steps``, of which the user may say the size."""

    def resolve(
        before: Slots, rng: random.Random, split: Split, language: Language
    ) -> Resolved | None:
        del split, language
        step = rng.choice(steps)
        return Resolved(action, {**{s: before[s] for s in kept}, "delta": step}, {"n": abs(step)})

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


def _same_for_zone(
    before: Slots, rng: random.Random, split: Split, language: Language
) -> Resolved | None:
    """The previous temperature or change of temperature, for another zone."""
    action = "climate.adjust" if "delta" in before else "climate.set"
    return _swap(action, "zone")(before, rng, split, language)


TEMPERATURE = ("climate.set", "climate.adjust")
VOLUME = ("media.volume", "media.adjust")
FAN = ("climate.fan", "climate.adjust_fan")

# action that can be cancelled -> the slot that tells what was cancelled
CANCELLED_SLOT = {
    "navigation.start": "destination",
    "navigation.find": "category",
    "climate.set": "zone",
    "climate.adjust": "zone",
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
    Followup("warmer", TEMPERATURE, _adjust("climate.adjust", ("zone",), 1)),
    Followup("cooler", TEMPERATURE, _adjust("climate.adjust", ("zone",), -1)),
    Followup("warmer_by", TEMPERATURE, _adjust("climate.adjust", ("zone",), 2, 3, 4)),
    Followup("cooler_by", TEMPERATURE, _adjust("climate.adjust", ("zone",), -2, -3, -4)),
    Followup("same_zone", TEMPERATURE, _same_for_zone),
    Followup("fan_up", FAN, _adjust("climate.adjust_fan", (), 1)),
    Followup("fan_down", FAN, _adjust("climate.adjust_fan", (), -1)),
    Followup("same_seat", ("climate.seat",), _swap("climate.seat", "seat")),
    Followup("avoid", ("navigation.start",), _swap("navigation.start", "avoid")),
    Followup("add_stop", ("navigation.start",), _add("navigation.stop", "stop", "destination")),
    Followup("eta", ("navigation.start",), _keep("navigation.eta", "destination")),
    Followup("go_there", ("navigation.find",), _keep("navigation.go", "category")),
    Followup("again", ("media.play",), _keep("media.repeat", "title")),
    Followup("same_artist", ("media.play",), _keep("media.artist", "artist")),
    Followup("louder", VOLUME, _adjust("media.adjust", (), 5)),
    Followup("quieter", VOLUME, _adjust("media.adjust", (), -5)),
    Followup("louder_by", VOLUME, _adjust("media.adjust", (), 2, 3, 4, 6, 7, 8, 9, 10)),
    Followup("quieter_by", VOLUME, _adjust("media.adjust", (), -2, -3, -4, -6, -7, -8, -9, -10)),
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
