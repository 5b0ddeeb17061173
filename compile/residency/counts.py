"""Counts of what routers chose, from which an activation map is made."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from emberd.daemon.activation_map import (
    SUCCESSORS,
    ActivationMap,
    CommandClass,
    Transitions,
)
from numpy.typing import NDArray

Counters = NDArray[np.uint32]


@dataclass
class ClassCounts:
    """Of one class; `choices` [layers, experts]: tokens that chose the expert."""

    choices: Counters
    commands: int = 0
    tokens: int = 0


@dataclass
class RoutingCounts:
    """Of all commands so far, whatever the order they came in.

    `next_token`, `next_layer` [layers, experts, experts]: how often the second expert was chosen by
    the next token in the same layer, and by the same token in the next layer, where the first was.
    """

    layers: int
    experts: int
    top_k: int
    classes: dict[str, ClassCounts] = field(default_factory=dict)
    next_token: Counters = field(init=False)
    next_layer: Counters = field(init=False)

    def __post_init__(self) -> None:
        shape = self.layers, self.experts, self.experts
        self.next_token = np.zeros(shape, np.uint32)
        self.next_layer = np.zeros(shape, np.uint32)

    def add(self, command_class: str, ids: NDArray[np.integer]) -> None:
        """Counts a command's tokens: ids [tokens, layers, top_k]."""
        if command_class not in self.classes:
            empty = np.zeros((self.layers, self.experts), np.uint32)
            self.classes[command_class] = ClassCounts(empty)
        counts = self.classes[command_class]
        counts.commands += 1
        counts.tokens += len(ids)
        ids = ids.astype(np.int64)
        layer = np.arange(self.layers)[:, None]
        np.add.at(counts.choices, (layer, ids), 1)
        pairs = layer[..., None], ids[:-1, :, :, None], ids[1:, :, None, :]
        np.add.at(self.next_token, pairs, 1)
        pairs = layer[:-1, :, None], ids[:, :-1, :, None], ids[:, 1:, None, :]
        np.add.at(self.next_layer, pairs, 1)

    def to_map(self, model: str) -> ActivationMap:
        """The map, bound to the model with this identity; classes by name."""
        return ActivationMap(
            model=model,
            layers=self.layers,
            experts=self.experts,
            top_k=self.top_k,
            classes=tuple(
                CommandClass(
                    name, counts.commands, counts.tokens, array("I", counts.choices.ravel())
                )
                for name, counts in sorted(self.classes.items())
            ),
            next_token=self._likeliest(self.next_token),
            next_layer=self._likeliest(self.next_layer),
        )

    def arrays(self) -> dict[str, NDArray[np.generic]]:
        """Everything, as arrays to save."""
        names = list(self.classes)
        counted = [(self.classes[name].commands, self.classes[name].tokens) for name in names]
        return {
            "names": np.array(names, np.str_),
            "counted": np.array(counted, np.int64).reshape(-1, 2),
            "choices": np.array([self.classes[name].choices for name in names], np.uint32),
            "next_token": self.next_token,
            "next_layer": self.next_layer,
        }

    def restore(self, arrays: Mapping[str, NDArray[np.generic]]) -> None:
        """Goes back to what `arrays` gave."""
        self.next_token = arrays["next_token"].astype(np.uint32)
        self.next_layer = arrays["next_layer"].astype(np.uint32)
        self.classes = {
            str(name): ClassCounts(choices.astype(np.uint32), int(commands), int(tokens))
            for name, choices, (commands, tokens) in zip(
                arrays["names"], arrays["choices"], arrays["counted"], strict=True
            )
        }

    def _likeliest(self, counts: Counters) -> Transitions:
        """Each expert's successors; every time it was chosen, `top_k` followed."""
        kept = min(SUCCESSORS, self.experts)
        order = np.argsort(-counts.astype(np.int64), axis=-1, kind="stable")[..., :kept]
        times = counts.sum(axis=-1, keepdims=True) // self.top_k
        shares = np.take_along_axis(counts, order, axis=-1) / np.maximum(times, 1)
        padding = [(0, 0), (0, 0), (0, SUCCESSORS - kept)]
        return Transitions(
            self.experts,
            array("H", np.pad(np.where(shares > 0, order, 0), padding).ravel().tolist()),
            array("H", np.pad(np.rint(shares * 65535), padding).ravel().astype(int).tolist()),
        )
