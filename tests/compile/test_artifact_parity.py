"""f32 artifacts against what they were compiled from, on every tiny model.

A token's logits depend on no later token, so the positions of one prompt of 700 tokens are the
last ones of prompts of 1 to 700.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import reference
from checkpoints import MODELS, TinyModel, write_checkpoint
from chunks import cut, step
from emberd.compile.build import build
from emberd.compile.convert import convert
from emberd.compile.oracle import Oracle
from emberd.daemon.artifact import Artifact
from emberd.daemon.core import Model
from emberd.daemon.session import LogitsRole
from needs import needs
from routing import RouterWatch

CHUNKS = (1, 64)
PROMPT, GREEDY = 636, 64
TOLERANCE = 1e-3  # of the logits' standard deviation
TIE = 1e-6  # router scores closer than this


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


@pytest.fixture(scope="module", params=MODELS, ids=lambda tiny: tiny.name)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Another prompt is drawn where a router meets a tie."""
    tiny: TinyModel = request.param
    folder = tmp_path_factory.mktemp(tiny.name)
    checkpoint = write_checkpoint(folder / "checkpoint", tiny)
    converted = convert(checkpoint, folder / "converted")
    build(converted.folder, folder / "artifact", "host", "f32", chunk_sizes=CHUNKS)
    for seed in itertools.count():
        tokens, logits = _greedy(folder / "artifact", tiny.vocab, np.random.default_rng(seed))
        oracle = Oracle(converted)
        watch = RouterWatch(oracle)
        expected = oracle.session().step(tokens)
        if watch.closest > TIE:
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
        for chunk in cut(run.tokens, model, generator):
            rows = step(session, chunk, role)
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
        for number in range(steps):
            places = [start + number for start in starts]
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
        rows = [step(session, chunk) for chunk in cut(tokens, model, generator)]
        for _ in range(GREEDY):
            tokens = np.append(tokens, rows[-1][-1].argmax().astype(np.int32))
            rows.append(step(session, tokens[-1:]))
    return tokens, np.concatenate(rows)
