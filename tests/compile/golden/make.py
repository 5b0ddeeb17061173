"""Writes logits.npz: what Hugging Face transformers answers for the tiny checkpoints.

Run from the repository root, with torch and transformers installed, after a change of
tests/checkpoints.py: `PYTHONPATH=tests python tests/compile/golden/make.py`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
from checkpoints import MODELS, write_checkpoint
from transformers import Qwen3_5MoeForCausalLM

GOLDEN_FILE = Path(__file__).parent / "logits.npz"


def transformers_logits(folder: Path, tokens: np.ndarray) -> np.ndarray:
    """f32[T, V] from the whole prompt at once, computed in float32."""
    model = Qwen3_5MoeForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation="eager"
    ).eval()
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens[None].astype(np.int64)), use_cache=False).logits[0]
    result: np.ndarray = logits.numpy()
    return result


def main() -> None:
    golden: dict[str, np.ndarray] = {}
    for model in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            write_checkpoint(Path(folder), model)
            logits = transformers_logits(Path(folder), model.tokens())
        golden[model.name] = logits[model.golden_rows()]
        print(f"{model.name:24} std {logits.std():.3f}")
    np.savez_compressed(GOLDEN_FILE, allow_pickle=False, **golden)


if __name__ == "__main__":
    main()
