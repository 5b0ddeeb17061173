"""What Hugging Face transformers answers: the reference at the start of the chain of parity."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np


def load(folder: Path, dtype: str = "float32") -> Any:
    """The model of a checkpoint folder, ready to answer."""
    import torch
    from transformers import Qwen3_5MoeForCausalLM

    return Qwen3_5MoeForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), experts_implementation="eager"
    ).eval()


def logits(model: Any, tokens: np.ndarray) -> np.ndarray:
    """f32[T, V] from all tokens at once, computed in float32."""
    import torch

    ids = torch.from_numpy(tokens[None].astype(np.int64))
    with torch.no_grad():
        result: np.ndarray = model.float()(ids, use_cache=False).logits[0].numpy()
    return result
