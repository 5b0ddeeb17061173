"""The command grammar: deterministic, valid actions, training and held-out sides disjoint."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from followups import CANCELLED_SLOT, FOLLOWUPS, Slots
from grammar import (
    HELDOUT_FORMS,
    LANGUAGES,
    SOURCES,
    Dialogue,
    action_json,
    expand,
    expansions,
    make_dialogue,
    normalised,
    parse_action,
)
from intents import CLASSES, ENUMS, REPLIES
from values import OPEN_SLOTS, Split
from write_dialogues import (
    COMMANDS_EACH,
    COMMANDS_SEED,
    HELDOUT_EACH,
    HELDOUT_SEED,
    command_rows,
    heldout_rows,
)
from write_dialogues import HERE as DEMO

SPLITS: tuple[Split, ...] = ("train", "heldout")


def dialogues(split: Split, count: int, seed: int = 5) -> list[Dialogue]:
    rng = random.Random(seed)
    return [make_dialogue(rng, split) for _ in range(count)]


def read_rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(row) for row in (DEMO / name).read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("split", SPLITS)
def test_a_seed_gives_the_same_dialogues(split: Split) -> None:
    assert dialogues(split, 200) == dialogues(split, 200)
    assert dialogues(split, 200) != dialogues(split, 200, seed=6)


@pytest.mark.parametrize("split", SPLITS)
def test_every_answer_ends_with_a_valid_action_line(split: Split) -> None:
    for dialogue in dialogues(split, 3000):
        for message in dialogue.messages:
            if message["role"] == "assistant":
                sentence, line = message["content"].split("\n")
                action = json.loads(line)
                assert sentence and action_json(action) == line
                assert action["action"].split(".")[0] in CLASSES
        assert parse_action(dialogue.messages[-1]["content"]) == dialogue.action
        assert dialogue.action["action"].split(".")[0] == dialogue.command_class


@pytest.mark.parametrize("split", SPLITS)
def test_roles_alternate(split: Split) -> None:
    for dialogue in dialogues(split, 500):
        roles = [m["role"] for m in dialogue.messages if m["role"] != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        assert all(m["role"] != "system" for m in dialogue.messages[1:])
        assert dialogue.prompt[-1]["role"] == "user"


def test_both_splits_cover_every_action_class_and_language() -> None:
    for split in SPLITS:
        made = dialogues(split, 4000)
        assert {d.action["action"] for d in made} == set(REPLIES)
        assert {(d.command_class, d.language) for d in made} == {
            (c, language) for c in CLASSES for language in LANGUAGES
        }


def test_no_template_form_is_in_both_splits() -> None:
    for source in SOURCES:
        for phrases in source.phrases.values():
            assert not set(phrases.train) & set(phrases.heldout)
    heldout = {
        " ".join(m["content"] for m in d.messages if m["role"] == "user")
        for d in dialogues("heldout", 5000)
    }
    trained = {
        " ".join(m["content"] for m in d.messages if m["role"] == "user")
        for d in dialogues("train", 20000)
    }
    assert not heldout & trained


def test_training_never_renders_a_heldout_form() -> None:
    turns = {
        normalised(m["content"])
        for d in dialogues("train", 20000)
        for m in d.messages
        if m["role"] == "user"
    }
    without_values = {form for form in HELDOUT_FORMS if "{" not in form}
    assert without_values and not without_values & turns


@pytest.mark.parametrize("slot", sorted(set(OPEN_SLOTS) - {"fan_level", "seat_level"}))
def test_open_values_are_disjoint(slot: str) -> None:
    rng = random.Random(1)
    drawn = {
        split: {
            OPEN_SLOTS[slot](rng, split, language) for language in LANGUAGES for _ in range(1500)
        }
        for split in SPLITS
    }
    assert drawn["train"] and drawn["heldout"]
    assert not drawn["train"] & drawn["heldout"]


def test_warmer_changes_the_zone_of_the_turn_before() -> None:
    warmer = next(f for f in FOLLOWUPS if f.name == "warmer")
    before: Slots = {"zone": "driver", "temperature": 21.5}
    resolved = warmer.resolve(before, random.Random(0), "heldout", "en")
    assert resolved is not None
    assert resolved.action == "climate.adjust"
    assert resolved.slots == {"zone": "driver", "delta": 1}


def test_what_can_be_cancelled_has_an_answer() -> None:
    for action in CANCELLED_SLOT:
        assert action.split(".")[0] + ".cancel" in REPLIES


def test_enumerated_values_have_words_in_both_languages() -> None:
    for values in ENUMS.values():
        for ways in values.values():
            assert all(ways[language] for language in LANGUAGES)


def test_expand_draws_one_of_all_expansions() -> None:
    template = "[a|b[c|d]] x[ y|]"
    every = set(expansions(template))
    assert every == {"a x y", "a x", "bc x y", "bc x", "bd x y", "bd x"}
    rng = random.Random(0)
    assert {expand(template, rng) for _ in range(200)} == every


def test_parse_action_takes_the_last_line_only() -> None:
    assert parse_action('Done.\n{"action":"media.next"}') == {"action": "media.next"}
    assert parse_action("Done.") is None
    assert parse_action("Done.\n[1]") is None


def test_written_dialogues_are_the_generated_ones() -> None:
    assert read_rows("heldout.jsonl") == heldout_rows(HELDOUT_SEED, HELDOUT_EACH)
    assert read_rows("commands.jsonl") == command_rows(COMMANDS_SEED, COMMANDS_EACH)
