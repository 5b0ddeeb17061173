"""What the sampler does with logits."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
from draws import draw
from emberd.daemon.errors import EmberdError
from emberd.daemon.sampling import Sampler, SamplingParameters


class Logits:
    """One row of logits."""

    def __init__(self, values: list[float]) -> None:
        self.values = list(values)
        self.rows, self.vocab_size = 1, len(values)

    def bias(self, biases: Mapping[int, float], row: int = -1) -> None:
        for token, bias in biases.items():
            self.values[token] += bias

    def get(self, token: int, row: int = -1) -> float:
        return self.values[token]

    def top(self, k: int, row: int = -1) -> tuple[list[int], list[float]]:
        ids = sorted(range(self.vocab_size), key=lambda i: (-self.values[i], i))[:k]
        return ids, [self.values[i] for i in ids]

    def log_sum_exp(self, row: int = -1) -> float:
        return math.log(math.fsum(math.exp(value) for value in self.values))

    def draw(
        self,
        uniform: float,
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
        row: int = -1,
    ) -> int:
        return draw(self.values, uniform, temperature, top_k, top_p, min_p)[0]


def test_the_draw_gets_the_parameters_and_a_number_of_the_seed() -> None:
    rng = random.Random(5)
    values = [rng.gauss(0, 1) for _ in range(50)]
    settings: dict[str, Any] = {"temperature": 1.5, "top_k": 40, "top_p": 0.9, "min_p": 0.05}
    sampler, uniforms = Sampler(SamplingParameters(seed=1, **settings)), random.Random("1:0")
    for _ in range(100):
        assert [sampler.sample(Logits(values)).token] == draw(values, uniforms.random(), **settings)


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
