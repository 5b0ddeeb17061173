"""Write ``heldout.jsonl`` (the evaluation set) and ``commands.jsonl`` (typical commands).

``python firmware_assets/demo/write_dialogues.py``
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from grammar import LANGUAGES, make_dialogue
from intents import CLASSES

HERE = Path(__file__).parent
HELDOUT_SEED, COMMANDS_SEED = 20260, 7
HELDOUT_EACH, COMMANDS_EACH = 50, 12  # dialogues for each class and language


def heldout_rows(seed: int, each: int) -> list[dict[str, object]]:
    """Held-out dialogues without their last answer, with the action that it must hold."""
    rng = random.Random(seed)
    made = [
        make_dialogue(rng, "heldout", command_class, language)
        for command_class in CLASSES
        for language in LANGUAGES
        for _ in range(each)
    ]
    return [
        {"class": d.command_class, "language": d.language, "messages": d.prompt, "action": d.action}
        for d in made
    ]


def command_rows(seed: int, each: int) -> list[dict[str, object]]:
    """Complete training-side dialogues of every class, as typical commands."""
    rng = random.Random(seed)
    made = [
        make_dialogue(rng, "train", command_class, language)
        for command_class in CLASSES
        for language in LANGUAGES
        for _ in range(each)
    ]
    return [{"class": d.command_class, "messages": d.messages} for d in made]


def write_rows(path: Path, rows: list[dict[str, object]]) -> None:
    """One JSON object a line, characters as they are."""
    path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows), "utf-8")


if __name__ == "__main__":
    write_rows(HERE / "heldout.jsonl", heldout_rows(HELDOUT_SEED, HELDOUT_EACH))
    write_rows(HERE / "commands.jsonl", command_rows(COMMANDS_SEED, COMMANDS_EACH))
