"""A tokenizer for a generated checkpoint: the embedded model's, with as many tokens as it takes.

What is added are pairs of its pieces, each a merge of its own. So texts are cut as the embedded
model cuts them, or coarser, and the tables are as large as those of a real model.
"""

from __future__ import annotations

import json
import shutil
from itertools import product
from pathlib import Path

_DEMO = Path(__file__).parents[2] / "firmware_assets" / "demo" / "model"


def write(folder: Path, vocab_size: int) -> None:
    """Writes tokenizer and chat template for ids below `vocab_size` to a checkpoint's folder.

    Raises ValueError for fewer ids than the embedded model has."""
    tokenizer = json.loads((_DEMO / "tokenizer.json").read_text(encoding="utf-8"))
    model, added = tokenizer["model"], tokenizer["added_tokens"]
    ids = model["vocab"]
    pieces, room = list(ids), vocab_size - len(added)
    if room < len(pieces):
        raise ValueError(f"{vocab_size} ids do not hold the embedded model's tokens")
    for first, second in product(pieces, pieces):
        if len(ids) == room:
            break
        if first + second not in ids:
            ids[first + second] = len(ids)
            model["merges"].append([first, second])
    for id, token in enumerate(added, room):
        token["id"] = id
    text = json.dumps(tokenizer, ensure_ascii=False)
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    shutil.copyfile(_DEMO / "tokenizer_config.json", folder / "tokenizer_config.json")
