"""`emberc run`: token ids in, logits out, through the core or onnxruntime."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from emberd.compile.converted import MODEL_FILE, ConvertedModel
from emberd.compile.files import write_whole
from emberd.compile.oracle import Oracle
from emberd.daemon.artifact import Artifact
from emberd.daemon.core import Model
from emberd.daemon.errors import EmberdError
from emberd.daemon.session import LogitsRole

BACKENDS = ("core", "onnxruntime")


def read_tokens(path: Path) -> list[int]:
    """A JSON list of token ids. Raises EmberdError when the file is anything else."""
    try:
        tokens = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise EmberdError(
            f"{path}: not a JSON file of token ids, with a list such as [1, 2, 3]: {error}"
        ) from error
    if not isinstance(tokens, list) or not tokens or any(type(t) is not int for t in tokens):
        raise EmberdError(f"{path}: expected a JSON list of at least one token id")
    return tokens


def core_logits(artifact: Path, tokens: list[int], threads: int | None = None) -> np.ndarray:
    """The core's logits f32[T, V] after each token."""
    model = Model(Artifact.open(artifact), threads)
    try:
        with model.open_session(len(tokens)) as session:
            parts = []
            for start in range(0, len(tokens), model.max_chunk):
                logits = session.step(tokens[start : start + model.max_chunk], LogitsRole.ALL)
                assert logits is not None
                parts.append(np.array(logits.memory(), np.float32).reshape(logits.rows, -1))
            return np.concatenate(parts)
    finally:
        model.close()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, help="artifact, or converted model")
    parser.add_argument(
        "--tokens", type=Path, metavar="FILE", required=True, help="file with a JSON list of ids"
    )
    parser.add_argument("--logits", type=Path, help="write f32[tokens, vocabulary] here as .npy")
    parser.add_argument(
        "--backend", choices=BACKENDS, help="core for artifacts, onnxruntime for converted models"
    )


def run(arguments: argparse.Namespace) -> None:
    tokens = read_tokens(arguments.tokens)
    converted = (arguments.model / MODEL_FILE).is_file()
    backend = BACKENDS[converted]
    if arguments.backend not in (None, backend):
        raise EmberdError(
            f"{arguments.model} runs on {backend}, not on {arguments.backend}: the core runs "
            "artifacts, onnxruntime runs converted models"
        )
    if converted:
        logits = Oracle(ConvertedModel.load(arguments.model)).session().step(tokens)
    else:
        logits = core_logits(arguments.model, tokens)
    if arguments.logits is not None:
        write_whole(arguments.logits, lambda file: np.lib.format.write_array(file, logits))
    finite = np.isfinite(logits).all(axis=-1)
    if not finite.all():
        raise EmberdError(f"the logits of position {finite.argmin()} are not finite numbers")
    best = logits[-1].argmax()
    print(f"{len(tokens)} tokens; most likely next: {best} (logit {logits[-1, best]:.4f})")
