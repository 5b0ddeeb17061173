"""onnxruntime on the converted model against Hugging Face transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import reference
from checkpoints import MODELS, TinyModel, write_checkpoint
from emberd.compile import oracle as oracle_module
from emberd.compile.convert import convert
from emberd.compile.converted import BlockInstance, ConvertedModel
from emberd.compile.oracle import Oracle
from emberd.daemon.errors import EmberdError
from needs import needs

TOLERANCE = 1e-3  # of the logits' standard deviation
GOLDEN = np.load(Path(__file__).parent / "golden" / "logits.npz")

DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}

by_name = pytest.mark.parametrize("tiny", MODELS, ids=lambda tiny: tiny.name)


@pytest.fixture
def standard(tmp_path: Path) -> ConvertedModel:
    return convert(write_checkpoint(tmp_path / "source", MODELS[0]), tmp_path / "model")


@by_name
def test_logits_are_those_of_transformers(tiny: TinyModel, tmp_path: Path) -> None:
    model = convert(write_checkpoint(tmp_path / "source", tiny), tmp_path / "model")
    session = Oracle(model).session()
    logits = np.concatenate([session.step(chunk) for chunk in tiny.chunks()])
    assert logits.shape == (tiny.prompt, tiny.vocab) and session.length == tiny.prompt
    expected = GOLDEN[tiny.name]
    assert 0.3 < expected.std() < 1.0
    error = np.abs(logits[tiny.golden_rows()] - expected).max()
    assert error <= TOLERANCE * expected.std()


@by_name
def test_logits_are_those_of_transformers_own_checkpoint(tiny: TinyModel, tmp_path: Path) -> None:
    """Every position of a checkpoint as `save_pretrained` lays it out, without golden files."""
    needs("torch")
    needs("transformers")
    drawn = write_checkpoint(tmp_path / "drawn", tiny)
    model = reference.load(drawn, DTYPES[tiny.dtype])
    model.save_pretrained(tmp_path / "saved", max_shard_size="200KB")
    expected = reference.logits(model, tiny.tokens())
    session = Oracle(convert(tmp_path / "saved", tmp_path / "model")).session()
    logits = np.concatenate([session.step(chunk) for chunk in tiny.chunks()])
    assert np.abs(logits - expected).max() <= TOLERANCE * expected.std()


def test_sessions_are_independent(standard: ConvertedModel) -> None:
    oracle, tokens = Oracle(standard), MODELS[0].tokens()
    alone = oracle.session().step(tokens)
    first, second = oracle.session(), oracle.session()
    first.step(tokens[:9])
    np.testing.assert_array_equal(second.step(tokens), alone)


def test_weights_can_be_replaced(standard: ConvertedModel) -> None:
    """A provider sees every weight once and decides what is computed."""
    asked = []

    def zero_head(block: BlockInstance, name: str) -> np.ndarray:
        asked.append((block.block, block.layer, name))
        weight = standard.read_weight(block.weights[name])
        return np.zeros_like(weight) if name == "lm_head" else weight

    session = Oracle(standard, zero_head).session()
    assert not session.step([1, 2]).any() and not session.step([3]).any()
    expected = [(b.block, b.layer, name) for b in standard.stack for name in b.weights]
    assert asked == expected


def test_large_models_are_read_block_by_block(
    standard: ConvertedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With little memory, weights are read anew at every step and the MoE sees few rows a time."""
    tokens = MODELS[0].tokens()
    expected = Oracle(standard).session().step(tokens)
    monkeypatch.setattr(oracle_module, "_KEPT_BYTES", 0)
    monkeypatch.setattr(oracle_module, "_GATHER_BYTES", 1)
    asked = []

    def counting(block: BlockInstance, name: str) -> np.ndarray:
        asked.append(name)
        return standard.read_weight(block.weights[name])

    session = Oracle(standard, counting).session()
    logits = np.concatenate([session.step(tokens[:60]), session.step(tokens[60:])])
    np.testing.assert_allclose(logits, expected, atol=1e-5)
    assert asked.count("lm_head") == 2
    assert asked.count("router") == 2 * len(MODELS[0].layers)


@pytest.mark.parametrize("tokens", [[], [-1], [MODELS[0].vocab], [[1, 2]]])
def test_tokens_outside_the_vocabulary_are_refused(
    standard: ConvertedModel, tokens: list[int]
) -> None:
    session = Oracle(standard).session()
    with pytest.raises(EmberdError, match=r"tokens in 0\.\.95"):
        session.step(tokens)
    assert session.length == 0
