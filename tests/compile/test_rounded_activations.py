"""q4a8 artifacts against onnxruntime that rounds activations to int8 as the kernels do.

What rounding them costs is told apart by `emberc verify`. What is left is the order of additions:
it can turn a rounding, and where router scores are nearly equal the choice of an expert with it, so
prompts are judged that are routed clearly.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from checkpoints import MODELS, TinyModel, write_checkpoint
from chunks import cut, step
from emberd.compile.build import build
from emberd.compile.convert import convert
from emberd.compile.quantised_oracle import quantised_oracle
from emberd.compile.quantize.recipes import RECIPES
from emberd.compile.verify import compare
from emberd.daemon.artifact import Artifact
from emberd.daemon.core import Model
from routing import clear_prompt

PROMPT = 24
GAP = 0.1  # router scores that no few roundings turn round are further apart


@pytest.mark.parametrize(
    "tiny", [tiny for tiny in MODELS if tiny.quantizable], ids=lambda tiny: tiny.name
)
def test_no_position_diverges(tiny: TinyModel, tmp_path: Path) -> None:
    """KL of at most 1e-3 at every position, and the same bits however the prompt is cut."""
    converted = convert(write_checkpoint(tmp_path / "checkpoint", tiny), tmp_path / "converted")
    tokens, expected = clear_prompt(quantised_oracle(converted, RECIPES["q4a8"]), PROMPT, GAP)
    build(converted.folder, tmp_path / "artifact", "host", "q4a8", chunk_sizes=(1, 8))
    with Model(Artifact.open(tmp_path / "artifact"), 2) as model:
        with model.open_session(PROMPT) as session:
            one_by_one = np.concatenate([step(session, tokens[i : i + 1]) for i in range(PROMPT)])
        with model.open_session(PROMPT) as session:
            chunks = cut(tokens, model, np.random.default_rng(0))
            in_chunks = np.concatenate([step(session, chunk) for chunk in chunks])
    assert compare(one_by_one, expected).max_kl <= 1e-3
    np.testing.assert_array_equal(in_chunks, one_by_one)
