"""Sampling against distributions computed over the whole vocabulary."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import pytest
from emberd.daemon.errors import EmberdError
from emberd.daemon.sampling import Sampler, SamplingParameters


class Logits:
    """One row of logits."""

    def __init__(self, values: list[float]) -> None:
        self.values = list(values)
        self.rows, self.vocab_size = 1, len(values)
        self.widest = 0

    def add(self, token: int, bias: float, row: int = -1) -> None:
        self.values[token] += bias

    def get(self, token: int, row: int = -1) -> float:
        return self.values[token]

    def top(self, k: int, row: int = -1) -> tuple[list[int], list[float]]:
        self.widest = max(self.widest, k)
        ids = sorted(range(self.vocab_size), key=lambda i: (-self.values[i], i))[:k]
        return ids, [self.values[i] for i in ids]

    def log_sum_exp(self, row: int = -1, temperature: float = 1.0) -> float:
        best = max(self.values)
        total = math.fsum(math.exp((value - best) / temperature) for value in self.values)
        return best / temperature + math.log(total)


def _reference(values: list[float], parameters: SamplingParameters) -> dict[int, float]:
    """The distribution, filtered one step after the other over the whole vocabulary."""
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    if parameters.top_k:
        order = order[: parameters.top_k]
    weights = [math.exp((values[i] - values[order[0]]) / parameters.temperature) for i in order]
    kept, mass, whole = 0, 0.0, math.fsum(weights)
    while kept < len(order) and (parameters.top_p == 1 or mass < parameters.top_p * whole):
        mass += weights[kept]
        kept += 1
    kept = sum(weight >= parameters.min_p for weight in weights[: max(kept, 1)])
    total = math.fsum(weights[:kept])
    return {i: weight / total for i, weight in zip(order[:kept], weights[:kept], strict=True)}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.3},
        {"temperature": 1.7},
        {"top_k": 5},
        {"top_p": 0.6},
        {"min_p": 0.2},
        {"top_k": 400, "top_p": 0.9, "temperature": 1.5},
        {"top_p": 0.97, "min_p": 0.01, "temperature": 1.4},
    ],
    ids=str,
)
@pytest.mark.parametrize("spread", [0.3, 3.0])
def test_the_draw_is_that_of_the_whole_vocabulary(settings: Any, spread: float) -> None:
    rng = random.Random(5)
    values = [rng.gauss(0, spread) for _ in range(700)]
    parameters = SamplingParameters(seed=1, **settings)
    expected = _reference(values, parameters)
    order = sorted(expected, key=lambda i: (-values[i], i))
    sampler, uniforms = Sampler(parameters), random.Random("1:0")
    for _ in range(200):
        drawn, mass = uniforms.random(), 0.0
        margins = []
        for token in order:
            mass += expected[token]
            margins.append((mass, token))
        due = next((token for edge, token in margins if edge > drawn), order[-1])
        near_edge = min(abs(edge - drawn) for edge, _ in margins) < 1e-12
        assert sampler.sample(Logits(values)).token == due or near_edge


def test_a_peaked_distribution_needs_few_candidates() -> None:
    logits = Logits([10.0 if i == 3 else -10.0 for i in range(5000)])
    assert Sampler(SamplingParameters(top_p=0.9, seed=1)).sample(logits).token == 3
    assert logits.widest <= 256


def test_greedy_takes_the_lowest_of_equals_and_bias_moves_it() -> None:
    values = [1.0, 2.0, 2.0, 0.0]
    greedy = SamplingParameters(temperature=0)
    assert Sampler(greedy).sample(Logits(values)).token == 1
    biased = SamplingParameters(temperature=0, logit_bias={3: 50.0})
    assert Sampler(biased).sample(Logits(values)).token == 3


def test_penalties_count_what_was_generated() -> None:
    presence = Sampler(SamplingParameters(temperature=0, presence_penalty=1.5))
    assert [presence.sample(Logits([2.0, 1.0])).token for _ in range(4)] == [0, 1, 0, 0]
    frequency = Sampler(SamplingParameters(temperature=0, frequency_penalty=0.6))
    tokens = [frequency.sample(Logits([2.0, 1.0])).token for _ in range(6)]
    assert tokens == [0, 0, 1, 0, 1, 0]


def test_logprobs_are_those_of_the_raw_logits() -> None:
    values = [0.0, math.log(3.0)]
    parameters = SamplingParameters(temperature=0, logit_bias={0: 90.0}, logprobs=2)
    sampled = Sampler(parameters).sample(Logits(values))
    assert sampled.token == 0
    assert sampled.logprob == pytest.approx(math.log(0.25))
    assert [token for token, _ in sampled.top] == [1, 0]
    assert sampled.top[0][1] == pytest.approx(math.log(0.75))


def test_equal_seeds_repeat_and_choices_differ() -> None:
    parameters = SamplingParameters(seed=11)
    logits = [0.0] * 50

    def run(choice: int) -> list[int]:
        sampler = Sampler(parameters, choice)
        return [sampler.sample(Logits(logits)).token for _ in range(20)]

    assert run(0) == run(0) != run(1)
    assert max(Counter(run(0)).values()) < 10


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_without_a_maximum_are_an_error(temperature: float) -> None:
    with pytest.raises(EmberdError, match="finite"):
        Sampler(SamplingParameters(temperature=temperature)).sample(Logits([math.nan] * 3))
