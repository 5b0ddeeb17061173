"""Choosing the next token from logits, without ever reading the whole vocabulary in Python.

Order, as in transformers' LogitsProcessor chain: penalties and bias, temperature, top-k, top-p
(of what top-k left), min-p (relative to the likeliest).
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from emberd.daemon.errors import NoFiniteLogits
from emberd.daemon.protocols import LogitsView


@dataclass(frozen=True)
class SamplingParameters:
    """How to sample.

    Attributes:
        temperature: 0 is greedy.
        top_k: 0 is off.
        presence_penalty, frequency_penalty: subtracted from the logits of generated tokens, once
            and per occurrence.
        logit_bias: token -> added to its logit.
        seed: None for a fresh one.
        logprobs: how many alternatives to report beside the chosen token; None for no report.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    logprobs: int | None = None


class Sampled(NamedTuple):
    """A chosen token; log probabilities are those of the raw logits."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def score(token: int, logits: LogitsView, alternatives: int, row: int = -1) -> Sampled:
    """A given token as if a row of logits had chosen it. Raises EmberdError on unusable logits."""
    normaliser, top = _alternatives(logits, alternatives, row)
    _check(normaliser)
    return Sampled(token, logits.get(token, row) - normaliser, top)


def _alternatives(
    logits: LogitsView, count: int, row: int = -1
) -> tuple[float, tuple[tuple[int, float], ...]]:
    """The log of a row's mass, and its likeliest tokens with their log probabilities."""
    normaliser = logits.log_sum_exp(row)
    ids, values = logits.top(count, row) if count else ([], [])
    return normaliser, tuple(
        (id, value - normaliser) for id, value in zip(ids, values, strict=True)
    )


class Sampler:
    """Samples one choice: keeps its random state and what penalties have come to."""

    def __init__(self, parameters: SamplingParameters, choice: int = 0) -> None:
        self._parameters = parameters
        self._greedy = parameters.temperature == 0
        self._filters = (
            parameters.temperature,
            parameters.top_k,
            parameters.top_p,
            parameters.min_p,
        )
        seed = parameters.seed
        self._penalised = bool(parameters.presence_penalty or parameters.frequency_penalty)
        self._random = random.Random() if seed is None else random.Random(f"{seed}:{choice}")
        self._counts: Counter[int] = Counter()
        self._biases = dict(parameters.logit_bias)  # with the penalties

    def sample(self, logits: LogitsView, row: int = -1) -> Sampled:
        """Choose from a row. Raises EmberdError where it holds no finite maximum."""
        report = self._parameters.logprobs
        if report is None:
            return Sampled(self._choose(logits, row))
        normaliser, top = _alternatives(logits, report, row)
        raw = {token: logits.get(token, row) for token in self._biases}
        token = self._choose(logits, row)
        value = raw[token] if token in raw else logits.get(token, row)
        return Sampled(token, value - normaliser, top)

    def _choose(self, logits: LogitsView, row: int) -> int:
        if self._biases:
            logits.bias(self._biases, row)
        uniform = 0.0 if self._greedy else self._random.random()
        token = logits.draw(uniform, *self._filters, row)
        if self._penalised:
            self._penalise(token)
        return token

    def _penalise(self, token: int) -> None:
        parameters = self._parameters
        self._counts[token] += 1
        penalty = parameters.presence_penalty + parameters.frequency_penalty * self._counts[token]
        self._biases[token] = parameters.logit_bias.get(token, 0.0) - penalty


def _check(value: float) -> None:
    if not math.isfinite(value):
        raise NoFiniteLogits
