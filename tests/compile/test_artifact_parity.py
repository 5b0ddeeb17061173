"""f32 artifacts against what they were compiled from, on every tiny model.

A token's logits depend on no later token, so the positions of one prompt of 700 tokens are the
last ones of prompts of 1 to 700.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import reference
from checkpoints import MODELS, TinyModel, write_checkpoint
from emberd.compile.build import build
from emberd.compile.convert import convert
from emberd.compile.oracle import Oracle
from emberd.daemon.artifact import Artifact
from emberd.daemon.core import LogitsRole, Model, Session
from needs import needs

CHUNKS = (1, 64)
PROMPT, GREEDY = 636, 64
TOLERANCE = 1e-3  # of the logits' standard deviation
TIE = 1e-6  # router scores, which are of the order of 1, closer than this


@dataclass(frozen=True)
class Run:
    """What an artifact answered: to a random prompt in random chunks, then greedily.

    `tokens` i32[700] are prompt and continuation, `logits` f32[700, V] the artifact's and
    `expected` f32[700, V] those of the converted model in onnxruntime.
    """

    checkpoint: Path
    artifact: Path
    tokens: np.ndarray
    logits: np.ndarray
    expected: np.ndarray

    def check(self, expected: np.ndarray) -> None:
        """Within the bound of `expected` f32[700, V], and of one opinion on every greedy token:
        then greedy decoding from `expected` gives the same continuation."""
        assert np.abs(self.logits - expected).max() <= TOLERANCE * expected.std()
        np.testing.assert_array_equal(expected[PROMPT - 1 : -1].argmax(-1), self.tokens[PROMPT:])


class WatchedOracle(Oracle):
    """Notes how far the scores of the last expert chosen and the first one left out ever were
    apart."""

    closest = np.inf

    def run(self, block: str, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
        top_k = self.model.dimensions.moe.top_k
        if block == "moe" and top_k < self.model.dimensions.moe.experts:
            hidden = inputs["hidden"]
            scale = 1 / np.sqrt((hidden**2).mean(-1, keepdims=True) + self.model.dimensions.eps)
            normed = hidden * scale * (1 + inputs["post_norm"])
            scores = -np.sort(-(normed @ inputs["router"].T))
            self.closest = min(self.closest, (scores[:, top_k - 1] - scores[:, top_k]).min())
        return super().run(block, inputs)


@pytest.fixture(scope="module", params=MODELS, ids=lambda tiny: tiny.name)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Another prompt is drawn where a router meets a tie: which expert it takes is then up to
    rounding, and no two implementations need to agree."""
    tiny: TinyModel = request.param
    folder = tmp_path_factory.mktemp(tiny.name)
    checkpoint = write_checkpoint(folder / "checkpoint", tiny)
    converted = convert(checkpoint, folder / "converted")
    build(converted.folder, folder / "artifact", "host", "f32", chunk_sizes=CHUNKS)
    for seed in itertools.count():
        tokens, logits = _greedy(folder / "artifact", tiny.vocab, np.random.default_rng(seed))
        oracle = WatchedOracle(converted)
        expected = oracle.session().step(tokens)
        if oracle.closest > TIE:
            return Run(checkpoint, folder / "artifact", tokens, logits, expected)
    raise AssertionError("unreachable")


def test_logits_and_greedy_tokens_are_those_of_the_converted_model(run: Run) -> None:
    run.check(run.expected)


def test_logits_and_greedy_tokens_are_those_of_transformers(run: Run) -> None:
    needs("torch")
    needs("transformers")
    run.check(reference.logits(reference.load(run.checkpoint), run.tokens))


@pytest.mark.parametrize("role", [LogitsRole.ALL, LogitsRole.LAST], ids=lambda role: role.name)
def test_logits_are_the_same_bits_however_the_prompt_is_cut(run: Run, role: LogitsRole) -> None:
    """Cut at other places, through the border between prompt and greedy tokens."""
    generator = np.random.default_rng([1, role])
    with (
        Model(Artifact.open(run.artifact), 2) as model,
        model.open_session(len(run.tokens)) as session,
    ):
        for chunk in _cut(run.tokens, generator):
            rows = _step(session, chunk, role)
            np.testing.assert_array_equal(
                rows, run.logits[session.length - len(rows) : session.length]
            )


def test_sessions_of_a_batch_get_the_same_bits_as_alone(run: Run) -> None:
    """Three sessions, each at its own place in the text, go on together."""
    starts, steps = (1, 90, 401), 5
    with Model(Artifact.open(run.artifact), 2) as model:
        sessions = [model.open_session(len(run.tokens)) for _ in starts]
        for session, start in zip(sessions, starts, strict=True):
            session.prefill(run.tokens[:start].tolist())
        for step in range(steps):
            places = [start + step for start in starts]
            logits = model.step_batch(sessions, run.tokens[places].tolist())
            np.testing.assert_array_equal(np.array(logits.memory()), run.logits[places])


def _greedy(
    artifact: Path, vocab: int, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """A random prompt, cut at random, with its continuation i32[700], and their logits."""
    tokens = generator.integers(0, vocab, PROMPT, np.int32)
    with (
        Model(Artifact.open(artifact), 2) as model,
        model.open_session(PROMPT + GREEDY) as session,
    ):
        rows = [_step(session, chunk, LogitsRole.ALL) for chunk in _cut(tokens, generator)]
        for _ in range(GREEDY):
            tokens = np.append(tokens, rows[-1][-1].argmax().astype(np.int32))
            rows.append(_step(session, tokens[-1:], LogitsRole.ALL))
    return tokens, np.concatenate(rows)


def _cut(tokens: np.ndarray, generator: np.random.Generator) -> Iterator[np.ndarray]:
    start = 0
    while start < len(tokens):
        size = int(generator.choice([1, 2, 7, 33, CHUNKS[-1]]))
        yield tokens[start : start + size]
        start += size


def _step(session: Session, tokens: np.ndarray, role: LogitsRole) -> np.ndarray:
    """A copy of the logits f32[T or 1, V]."""
    logits = session.step(tokens.tolist(), role)
    assert logits is not None
    return np.array(logits.memory())
