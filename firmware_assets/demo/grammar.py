"""The seeded command grammar: dialogues of one to four turns with their JSON actions.

Every dialogue starts with a request that stands alone and may go on with follow-ups. Training and
held-out dialogues use disjoint templates (see ``intents`` and ``followups``) and disjoint values
(see ``values``).
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from followups import FOLLOWUPS, Followup, Slots
from intents import CLASSES, ENUMS, FIELDS, INTENTS, REPLIES, Intent
from values import OPEN_SLOTS, Language, Split, Value

LANGUAGES: tuple[Language, ...] = ("en", "zh")
Message = dict[str, str]
Action = dict[str, Any]

SYSTEM_PROMPTS: dict[Split, tuple[str, ...]] = {
    "train": (
        "You are a helpful assistant.",
        "You are the assistant of this device. Answer with one sentence and a JSON action.",
        "You are an in-car and machine assistant.",
        "你是设备助手。",
        "你是车载和工业设备的语音助手，请简短回答。",
    ),
    "heldout": ("You are the voice assistant of this machine.", "你是一个语音助手。"),
}
TURNS: dict[Split, tuple[int, ...]] = {"train": (1, 2, 2, 3, 4), "heldout": (1, 1, 1, 2, 2, 3, 4)}
# words that may surround any training request: (before, after) for each language
FILLERS: dict[Language, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "en": (
        ("please ", "okay, ", "hey, ", "now ", "well, ", "and ", "then ", "so ", "yes, ", "no, "),
        (" please", ", please", " now", " for me", " then", ", thanks", " thank you", " right now"),
    ),
    "zh": (
        ("请", "麻烦", "现在", "好的，", "那", "嗯，", "你好，", "然后", "我说", "给我"),
        ("吧", "一下", "，谢谢", "好吗", "可以吗", "，快点", "，麻烦了", "啊"),
    ),
}
SOURCES: tuple[Intent | Followup, ...] = (*INTENTS, *FOLLOWUPS)
_ALTERNATIVES = re.compile(r"\[([^\[\]]*)\]")


@dataclass(frozen=True)
class Dialogue:
    """A conversation; ``messages`` alternate user and assistant, a system message may lead."""

    command_class: str
    language: Language
    messages: list[Message]
    action: Action

    @property
    def prompt(self) -> list[Message]:
        """The messages up to and including the last one of the user."""
        return self.messages[:-1]


def expand(template: str, rng: random.Random) -> str:
    """Choose one of every ``[a|b|]``, innermost first."""
    while match := _ALTERNATIVES.search(template):
        chosen = rng.choice(match.group(1).split("|"))
        template = template[: match.start()] + chosen + template[match.end() :]
    return template


def expansions(template: str) -> Iterator[str]:
    """All texts that a template can expand to."""
    match = _ALTERNATIVES.search(template)
    if match is None:
        yield template
        return
    for chosen in match.group(1).split("|"):
        yield from expansions(template[: match.start()] + chosen + template[match.end() :])


def normalised(text: str) -> str:
    """A template's words alone: lower case, without punctuation and spaces around."""
    return " ".join(re.sub(r"[.,?!，。？！]", " ", text.lower()).split())


def heldout_forms() -> frozenset[str]:
    """Every normalised form of a held-out template; training never renders one of them."""
    return frozenset(
        normalised(form)
        for source in SOURCES
        for phrases in source.phrases.values()
        for template in phrases.heldout
        for form in expansions(template)
    )


HELDOUT_FORMS = heldout_forms()


def action_json(action: Action) -> str:
    """The canonical text of an action: compact, fields in grammar order, characters as they are."""
    return json.dumps(action, ensure_ascii=False, separators=(",", ":"))


def parse_action(answer: str) -> Action | None:
    """The JSON action on the last line of an answer, or None if there is none."""
    try:
        action = json.loads(answer.strip().rsplit("\n", 1)[-1])
    except json.JSONDecodeError:
        return None
    return action if isinstance(action, dict) else None


def _phrases(source: Intent | Followup, split: Split, language: Language) -> tuple[str, ...]:
    phrases = source.phrases[language]
    return phrases.train if split == "train" else phrases.heldout


def _surface(slot: str, value: Value, language: Language, rng: random.Random | None) -> str:
    """How a value is said: a random surface, or with ``rng`` None the one that answers use."""
    if slot not in ENUMS:
        if slot == "n" and language == "zh" and rng is not None and rng.random() < 0.5:
            return "零一两三四五六七八九十"[int(value)]
        return str(value)
    surfaces = ENUMS[slot][str(value)][language]
    return rng.choice(surfaces) if rng else surfaces[0]


def _training_form(phrases: tuple[str, ...], language: Language, rng: random.Random) -> str:
    """A training template, often between fillers, that is not a form of a held-out template."""
    while True:
        text = expand(rng.choice(phrases), rng).strip()
        before, after = FILLERS[language]
        if rng.random() < 0.25:
            text = rng.choice(before) + text
        if rng.random() < 0.25 and text[-1] not in "?？":
            text += rng.choice(after)
        if normalised(text) not in HELDOUT_FORMS:
            return text


def _user_text(
    source: Intent | Followup, spoken: Slots, split: Split, language: Language, rng: random.Random
) -> str:
    phrases = _phrases(source, split, language)
    if split == "train":
        text = _training_form(phrases, language, rng)
    else:
        text = expand(rng.choice(phrases), rng).strip()
    values = {slot: _surface(slot, value, language, rng) for slot, value in spoken.items()}
    if language == "en" and rng.random() < 0.4:
        text = text[0].upper() + text[1:]
    if rng.random() < 0.2 and text[-1].isalpha():
        text += "." if language == "en" else "。"
    return text.format(**values)


def _action(name: str, slots: Slots) -> Action:
    return {"action": name, **{FIELDS.get(slot, slot): value for slot, value in slots.items()}}


def _answer(name: str, slots: Slots, language: Language) -> str:
    """One sentence, then the action on a line of its own."""
    values = {slot: _surface(slot, value, language, None) for slot, value in slots.items()}
    sentence = REPLIES[name][language].format(**values)
    return f"{sentence}\n{action_json(_action(name, slots))}"


def _open_dialogue(
    command_class: str, split: Split, language: Language, rng: random.Random
) -> tuple[str, Slots, str]:
    """The first request: its action, the action's slots and the user's words."""
    intents = [i for i in INTENTS if i.command_class == command_class]
    weights = [i.training_weight if split == "train" else 1 for i in intents]
    intent = rng.choices(intents, weights)[0]
    spoken: Slots = {}
    for slot in intent.slots:
        draw = OPEN_SLOTS.get(slot)
        spoken[slot] = draw(rng, split, language) if draw else rng.choice(list(ENUMS[slot]))
    text = _user_text(intent, spoken, split, language, rng)
    return intent.action, {**intent.defaults, **spoken}, text


def _follow(
    action: str, slots: Slots, split: Split, language: Language, rng: random.Random
) -> tuple[str, Slots, str] | None:
    """A follow-up of the given turn, in the form of ``_open_dialogue``; None if there is none."""
    candidates = [f for f in FOLLOWUPS if action in f.after]
    rng.shuffle(candidates)
    for followup in candidates:
        resolved = followup.resolve(slots, rng, split, language)
        if resolved is not None:
            text = _user_text(followup, resolved.spoken, split, language, rng)
            return resolved.action, resolved.slots, text
    return None


def make_dialogue(
    rng: random.Random,
    split: Split,
    command_class: str | None = None,
    language: Language | None = None,
    turns: int | None = None,
) -> Dialogue:
    """A random dialogue of ``split``; anything not given is drawn."""
    command_class = command_class or rng.choice(CLASSES)
    spoken_in = rng.choice(LANGUAGES) if language is None else language
    turns = turns or rng.choice(TURNS[split])
    messages: list[Message] = []
    if rng.random() < 0.2:
        messages.append({"role": "system", "content": rng.choice(SYSTEM_PROMPTS[split])})
    action, slots, text = _open_dialogue(command_class, split, spoken_in, rng)
    while True:
        messages.append({"role": "user", "content": text})
        messages.append({"role": "assistant", "content": _answer(action, slots, spoken_in)})
        turns -= 1
        following = _follow(action, slots, split, spoken_in, rng) if turns else None
        if following is None:
            return Dialogue(command_class, spoken_in, messages, _action(action, slots))
        action, slots, text = following
