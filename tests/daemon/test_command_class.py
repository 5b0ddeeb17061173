"""The class of a command is told by the experts that its tokens choose."""

from __future__ import annotations

import json
from array import array
from pathlib import Path

import numpy as np
import pytest
from emberd.daemon.activation_map import SUCCESSORS, ActivationMap, CommandClass, Transitions
from emberd.daemon.artifact import Artifact
from emberd.daemon.command_class import ClassEvidence, likeliest_class
from emberd.daemon.core import Model
from emberd.daemon.prompt import load_template, load_tokenizer

DEMO = Path(__file__).parents[2] / "firmware_assets" / "demo"


def small_map(choices: list[list[int]], commands: list[int]) -> ActivationMap:
    """Of one layer, with a class for each row of choices."""
    experts = len(choices[0])
    nothing = Transitions(experts, *(array("H", bytes(2 * experts * SUCCESSORS)) for _ in range(2)))
    classes = tuple(
        CommandClass(f"class {i}", count, sum(row), array("I", row))
        for i, (row, count) in enumerate(zip(choices, commands, strict=True))
    )
    return ActivationMap("model", 1, experts, 1, classes, nothing, nothing)


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ([5, 1, 0, 0], 0),
        ([0, 1, 4, 0], 1),
        ([0, 0, 0, 3], None),  # an expert that no class ever chose
        ([3, 3, 3, 3], None),
        ([0, 0, 0, 0], 2),
        ([2, 0, 2, 0], 2),  # seldom in class 2, but never in the others
    ],
)
def test_likeliest_class(chosen: list[int], expected: int | None) -> None:
    classes = small_map([[90, 10, 0, 0], [0, 10, 90, 0], [30, 40, 30, 0]], [1, 1, 2])
    assert likeliest_class(classes, chosen) == expected


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [([0, 0, 0, 0], None), ([2, 1, 0, 0], None), ([12, 1, 0, 0], 0), ([3, 3, 3, 3], None)],
)
def test_a_class_that_is_clear(chosen: list[int], expected: int | None) -> None:
    evidence = ClassEvidence(small_map([[90, 10, 0, 0], [40, 60, 0, 0]], [1, 1]))
    evidence.add(0, chosen)
    assert evidence.clearest() == expected


def test_one_class_is_clear_when_it_is_like_the_tokens() -> None:
    for chosen, expected in (([40, 0], 0), ([0, 40], None)):
        evidence = ClassEvidence(small_map([[99, 1]], [1]))
        evidence.add(0, chosen)
        assert evidence.clearest() == expected


def held_out(artifact: Artifact) -> list[tuple[str, list[int]]]:
    """Class and tokens of held-out prompts, some of each class."""
    tokenizer, template = load_tokenizer(artifact), load_template(artifact)
    assert template is not None
    found: dict[str, list[list[int]]] = {}
    for line in (DEMO / "heldout.jsonl").read_text(encoding="utf-8").splitlines():
        command = json.loads(line)
        chat = command["messages"]
        rendered = template.render(chat[: 1 + (chat[0]["role"] == "system")], True, {})
        found.setdefault(command["class"], []).append(tokenizer.encode_with_control(rendered))
    return [(name, tokens) for name, some in found.items() for tokens in some[:20]]


def test_classes_of_prompts(demo_artifact: Path) -> None:
    """After all layers, and as soon as it is clear."""
    artifact = Artifact.open(demo_artifact)
    known = ActivationMap.read(DEMO / "expert_activation_map.bin")
    late, early = [], []
    with Model(artifact, 2) as model, model.open_session(256) as session:
        before = np.array(model.chosen_experts(), np.int64)
        for name, tokens in held_out(artifact):
            session.reset()
            session.prefill(tokens)
            now = np.array(model.chosen_experts(), np.int64)
            chosen, before = (now - before).tolist(), now
            late.append(likeliest_class(known, chosen) == known.index(name))
            evidence = ClassEvidence(known)
            for layer in range(known.layers):
                evidence.add(layer, chosen[layer * known.experts : (layer + 1) * known.experts])
                if evidence.clearest() is not None:
                    early.append((layer, evidence.clearest() == known.index(name)))
                    break
    assert np.mean(late) >= 0.8
    assert len(early) >= 0.8 * len(late) and np.mean([right for _, right in early]) >= 0.9
