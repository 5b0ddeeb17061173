"""The expert activation map (expert_activation_map.bin): which experts typical commands choose.

`emberc profile` counts the routers' choices over the commands of each class; `emberc build --map`
orders experts.bin by the counts, and the daemon reads the experts that it will want before they
are asked for. The file is one msgpack map:

    format, version
    model         hex BLAKE2b-256: `ModelDescription.identity` of the artifact that was profiled
    layers, experts, top_k
    classes       a map each: name; commands and tokens counted; choices, uint32 [layers, experts]:
                  how many tokens chose the expert
    next_token    transitions: experts of the same layer that the next token chose
    next_layer    transitions: experts of the next layer that the same token chose

Transitions are {successors, shares}, both uint16 [layers, experts, SUCCESSORS]: from an expert to
its likeliest successors, likeliest first. A share, in units of 1/65535, is how often the successor
was chosen where the expert had been; 0 stands for no successor. Numbers are little-endian.

The identity says what the weights are, not how the artifact is laid out: a build with the map moves
experts about in their file, and the map still fits.
"""

from __future__ import annotations

import logging
import sys
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import msgpack
from emberd.daemon.artifact import Artifact
from emberd.daemon.errors import EmberdError
from emberd.daemon.record import INT64_MAX, Record

MAP_FILE = "expert_activation_map.bin"
FORMAT = "emberd-activation-map"
VERSION = 1
MAX_BYTES = 2_100_000
SUCCESSORS = 8  # kept of each expert

_MAX_LAYERS = 1024
_MAX_EXPERTS = 1 << 16
_MAX_COUNT = 2**32 - 1
SHARE_UNIT = 65535
_NAME_CHARACTERS = 80
_OTHER_BYTES = 512  # of a file at most, beside its classes and transitions
_CLASS_BYTES = 4 * _NAME_CHARACTERS + 128  # of a class at most, beside its choices

log = logging.getLogger("emberd")

Expert = tuple[int, int]
"""(layer, expert)."""


@dataclass(frozen=True)
class CommandClass:
    """What was counted over the commands of a class.

    `choices` uint32 [layers * experts]: how many tokens chose each expert. Every token chooses
    `top_k` experts in every layer.
    """

    name: str
    commands: int
    tokens: int
    choices: array[int]


@dataclass(frozen=True)
class Transitions:
    """From each expert to its likeliest successors: both uint16 [layers * experts * SUCCESSORS]."""

    experts: int
    successors: array[int]
    shares: array[int]

    def after(self, layer: int, expert: int) -> list[tuple[int, float]]:
        """(expert, share of the times it followed), likeliest first."""
        start = (layer * self.experts + expert) * SUCCESSORS
        row = slice(start, start + SUCCESSORS)
        pairs = zip(self.successors[row], self.shares[row], strict=True)
        return [(successor, share / SHARE_UNIT) for successor, share in pairs if share]

    def members(self) -> dict[str, bytes]:
        """As they are in a file."""
        return {"successors": _bytes(self.successors), "shares": _bytes(self.shares)}


@dataclass(frozen=True)
class ActivationMap:
    """A map that has been checked as a whole. A class's index is its place in `classes`."""

    model: str
    layers: int
    experts: int
    top_k: int
    classes: tuple[CommandClass, ...]
    next_token: Transitions
    next_layer: Transitions

    @classmethod
    def from_bytes(cls, data: bytes) -> ActivationMap:
        """Reads a map; EmberdError says what is not as it must be."""
        if len(data) > MAX_BYTES:
            raise EmberdError(f"activation map: more than {MAX_BYTES} bytes")
        try:
            top = msgpack.unpackb(data)
        except (ValueError, msgpack.exceptions.UnpackException, RecursionError) as error:
            raise EmberdError(
                f"not an activation map of emberc profile, or a damaged one: {error}"
            ) from None
        if not isinstance(top, dict) or top.get("format") != FORMAT:
            raise EmberdError("not an activation map of emberc profile")
        record = Record(top, "activation map")
        if top.get("version") != VERSION:
            raise EmberdError(
                f"activation map: version {top.get('version')!r:.80}, this emberd reads {VERSION}: "
                "profile again with a matching emberc"
            )
        layers = record.integer("layers", 1, _MAX_LAYERS)
        experts = record.integer("experts", 1, _MAX_EXPERTS)
        top_k = record.integer("top_k", 1, experts)
        classes = tuple(
            _command_class(entry, layers, experts, top_k) for entry in record.records("classes")
        )
        names = [command_class.name for command_class in classes]
        if not names or len(set(names)) != len(names):
            raise EmberdError("activation map: classes are none, or have a name in common")
        return cls(
            model=record.string("model"),
            layers=layers,
            experts=experts,
            top_k=top_k,
            classes=classes,
            next_token=_transitions(record.record("next_token"), layers, experts),
            next_layer=_transitions(record.record("next_layer"), layers, experts),
        )

    @classmethod
    def read(cls, path: Path) -> ActivationMap:
        """Reads a map's file. Raises EmberdError naming it."""
        try:
            with path.open("rb") as file:
                return cls.from_bytes(file.read(MAX_BYTES + 1))
        except OSError as error:
            raise EmberdError(f"{path}: cannot be read: {error.strerror}") from None
        except EmberdError as error:
            raise EmberdError(f"{path}: {error}") from None

    def to_bytes(self) -> bytes:
        """expert_activation_map.bin; equal maps give equal bytes.

        Raises EmberdError when that is more than MAX_BYTES: too many classes.
        """
        top = {
            "format": FORMAT,
            "version": VERSION,
            "model": self.model,
            "layers": self.layers,
            "experts": self.experts,
            "top_k": self.top_k,
            "classes": [
                {
                    "name": entry.name,
                    "commands": entry.commands,
                    "tokens": entry.tokens,
                    "choices": _bytes(entry.choices),
                }
                for entry in self.classes
            ],
            "next_token": self.next_token.members(),
            "next_layer": self.next_layer.members(),
        }
        data: bytes = msgpack.packb(top)
        if len(data) > MAX_BYTES:
            raise EmberdError(
                f"a map of {len(self.classes)} classes for {self.layers} layers of {self.experts} "
                f"experts has {len(data)} bytes, at most {MAX_BYTES} fit: use fewer classes"
            )
        return data

    @classmethod
    def of(cls, artifact: Artifact) -> ActivationMap | None:
        """The map that an artifact was shipped with, if it has one and it is of this very model;
        a warning is logged of one that is not, or is damaged."""
        if not artifact.has(MAP_FILE):
            return None
        try:
            found = cls.from_bytes(artifact.read(MAP_FILE))
            found.check_model(artifact.model.identity)
        except EmberdError as error:
            log.warning("%s: going on without a map: %s", artifact.path, error)
            return None
        return found

    def check_model(self, identity: str) -> None:
        """Raises EmberdError when the map is not of the model with this identity."""
        if self.model != identity:
            raise EmberdError(
                f"the activation map was made for another model ({_short(self.model)}, this one "
                f"is {_short(identity)}): profile this one"
            )

    def index(self, name: str) -> int:
        """The class of this name. Raises EmberdError naming those that there are."""
        for index, entry in enumerate(self.classes):
            if entry.name == name:
                return index
        known = ", ".join(entry.name for entry in self.classes)
        raise EmberdError(f"the activation map has no class {name!r:.80}; it has {known}")

    @property
    def priors(self) -> list[float]:
        """How likely a command is of each class: its share of the commands."""
        total = sum(entry.commands for entry in self.classes)
        return [entry.commands / total for entry in self.classes]

    def mass(self, layer: int, command_class: int | None = None) -> list[float]:
        """Each expert's share of the layer's choices for a class; None: for any command."""
        if command_class is not None:
            return self._masses[command_class][layer]
        return self._any_mass[layer]

    def ranking(self, layer: int, command_class: int | None = None) -> list[int]:
        """The layer's experts, most chosen first, ties to the lower id."""
        mass = self.mass(layer, command_class)
        return sorted(range(self.experts), key=lambda expert: -mass[expert])

    def hottest(self, count: int, command_class: int | None = None) -> list[Expert]:
        """The `count` most chosen experts of all layers, in the order to read them in."""
        keys = [
            (-mass, layer, expert)
            for layer in range(self.layers)
            for expert, mass in enumerate(self.mass(layer, command_class))
        ]
        return [(layer, expert) for _, layer, expert in sorted(keys)[: max(count, 0)]]

    def coverage(self, count: int, layer: int, command_class: int | None = None) -> float:
        """Share of the layer's choices that its `count` most chosen experts take."""
        return sum(sorted(self.mass(layer, command_class), reverse=True)[:count])

    @cached_property
    def _masses(self) -> list[list[list[float]]]:
        """By class, layer, expert."""
        return [
            [
                [chosen / (entry.tokens * self.top_k) for chosen in row]
                for row in _rows(entry.choices, self.experts)
            ]
            for entry in self.classes
        ]

    @cached_property
    def _any_mass(self) -> list[list[float]]:
        weighted = list(zip(self.priors, self._masses, strict=True))
        return [
            [
                sum(prior * masses[layer][expert] for prior, masses in weighted)
                for expert in range(self.experts)
            ]
            for layer in range(self.layers)
        ]


def most_classes(layers: int, experts: int) -> int:
    """How many classes a map of this shape holds, whatever their names."""
    entries = layers * experts
    transitions = 2 * 2 * 2 * SUCCESSORS * entries
    return (MAX_BYTES - transitions - _OTHER_BYTES) // (4 * entries + _CLASS_BYTES)


def _command_class(record: Record, layers: int, experts: int, top_k: int) -> CommandClass:
    name = record.string("name")
    if not 0 < len(name) <= _NAME_CHARACTERS or not name.isprintable():
        raise EmberdError(f"{record.name('name')} is {name!r:.100}: not a name for a class")
    commands = record.integer("commands", 1, INT64_MAX)
    tokens = record.integer("tokens", 1, _MAX_COUNT)
    choices = _table(record, "choices", "I", layers * experts)
    for layer, row in enumerate(_rows(choices, experts)):
        if sum(row) != tokens * top_k or max(row) > tokens:
            raise EmberdError(
                f"{record.name('choices')}: layer {layer} has {sum(row)} choices, expected "
                f"{top_k} different experts for each of {tokens} tokens"
            )
    return CommandClass(name, commands, tokens, choices)


def _transitions(record: Record, layers: int, experts: int) -> Transitions:
    entries = layers * experts * SUCCESSORS
    successors = _table(record, "successors", "H", entries)
    if max(successors) >= experts:
        raise EmberdError(f"{record.name('successors')}: expert {max(successors)} of {experts}")
    return Transitions(experts, successors, _table(record, "shares", "H", entries))


def _table(record: Record, member: str, code: str, entries: int) -> array[int]:
    """Unsigned integers of the type `code` (of the array module), as they are in a file."""
    table = array(code)
    data = record.packed(member, table.itemsize)
    if len(data) != entries * table.itemsize:
        raise EmberdError(f"{record.name(member)} is not a table of {entries} entries")
    table.frombytes(data)
    if sys.byteorder == "big":
        table.byteswap()
    return table


def _bytes(table: array[int]) -> bytes:
    if sys.byteorder == "big":
        table = table[:]
        table.byteswap()
    return table.tobytes()


def _rows(values: array[int], width: int) -> Iterator[array[int]]:
    for start in range(0, len(values), width):
        yield values[start : start + width]


def _short(identity: str) -> str:
    return repr(identity[:12]) if identity else "of no known identity"
