"""What is read from the logits of an artifact is what a scan of all of them finds."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from checkpoints import TinyModel, write_checkpoint
from draws import draw
from emberd.compile.build import build
from emberd.compile.convert import convert
from emberd.daemon.artifact import Artifact
from emberd.daemon.core import Logits, Model
from emberd.daemon.session import LogitsRole

MODELS = [
    ("q4", TinyModel("whole_blocks", layers="D", hidden=64, vocab=640)),
    ("f32", TinyModel("odd", layers="D", hidden=48, vocab=333)),
    ("q8", TinyModel("one_block", layers="D", hidden=64, vocab=50)),
]
SETTINGS = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.05, "top_k": 7},
    {"temperature": 0.05, "top_k": 300, "top_p": 0.5},
    {"temperature": 0.3, "top_p": 0.4},
    {"temperature": 0.2, "min_p": 0.3},
]


@pytest.fixture(scope="module", params=MODELS, ids=lambda choice: choice[1].name)
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Model]:
    recipe, tiny = request.param
    folder = tmp_path_factory.mktemp(tiny.name)
    write_checkpoint(folder / "checkpoint", tiny)
    convert(folder / "checkpoint", folder / "converted")
    build(folder / "converted", folder / "artifact", "host", recipe, chunk_sizes=(1, 16))
    with Model(Artifact.open(folder / "artifact"), threads=2) as opened:
        yield opened


def _check(logits: Logits) -> None:
    """Every row of a step: all that is read, against sorting."""
    values = np.array(logits.memory())
    for row, expected in enumerate(values):
        order = np.argsort(-expected, kind="stable")
        for k in (1, 5, len(order)):
            ids, found = logits.top(k, row)
            assert ids == order[:k].tolist() and found == expected[order[:k]].tolist()
        total = np.log(np.exp(expected.astype(np.float64)).sum())
        assert logits.log_sum_exp(row) == pytest.approx(total, rel=1e-6)
        for settings in SETTINGS:
            for uniform in (0.0, 0.37, 0.99):
                drawn = logits.draw(uniform, row=row, **settings)  # type: ignore[arg-type]
                assert drawn in draw(expected.tolist(), uniform, tolerance=1e-6, **settings)


def _changed(logits: Logits) -> Iterator[Logits]:
    """The logits of a step as they are, with biases, and masked."""
    yield logits
    generator = np.random.default_rng(0)
    for row in range(logits.rows):
        tokens = generator.choice(logits.vocab_size, 20, replace=False).tolist()
        top, lowest = logits.top(1, row)[0][0], int(np.argmin(np.array(logits.memory())[row]))
        biases = dict(zip(tokens, generator.normal(0, 5, 20).tolist(), strict=True))
        logits.bias(biases | {top: -100.0, lowest: 3.0}, row)
    yield logits
    blocks = -(-logits.vocab_size // 64)
    words = generator.integers(0, 2**63, blocks, np.uint64)
    words[0] = [2**64 - 1, 0, 1 << 40][blocks % 3]
    words[-1] |= np.uint64(1)
    for row in range(logits.rows):
        logits.mask(words.tobytes(), row)
    yield logits


def test_every_role_has_its_bounds(model: Model) -> None:
    generator = np.random.default_rng(1)
    tokens = generator.integers(0, model.vocab_size, 40).tolist()
    with model.open_session(64) as first, model.open_session(64) as second:
        for step in (
            lambda: first.step(tokens[:16], LogitsRole.ALL),
            lambda: first.step(tokens[:7], LogitsRole.LAST),
            lambda: first.step(tokens[7:8], LogitsRole.LAST),
            lambda: first.step(tokens[8:11], LogitsRole.ALL),
            lambda: model.step_batch([first, second], tokens[20:22]),
        ):
            logits = step()
            assert logits is not None
            for changed in _changed(logits):
                _check(changed)
