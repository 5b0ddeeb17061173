"""Writes logits.npz: what Hugging Face transformers answers for the tiny checkpoints.

Run from the repository root, with torch and transformers installed, after a change of
tests/checkpoints.py: `PYTHONPATH=tests python tests/compile/golden/make.py`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import reference
from checkpoints import MODELS, write_checkpoint

GOLDEN_FILE = Path(__file__).parent / "logits.npz"


def main() -> None:
    golden: dict[str, np.ndarray] = {}
    for model in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            write_checkpoint(Path(folder), model)
            logits = reference.logits(reference.load(Path(folder)), model.tokens())
        golden[model.name] = logits[model.golden_rows()]
        print(f"{model.name:24} std {logits.std():.3f}")
    np.savez_compressed(GOLDEN_FILE, allow_pickle=False, **golden)


if __name__ == "__main__":
    main()
