"""Replays against models so simple that they must be right."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations

import numpy as np
import pytest
from activation_maps import random_map
from emberd.compile.predict.available import available
from emberd.compile.predict.predictor import Experts, multi_hot
from emberd.compile.residency.replay import Expectation, Outcome, Step, replay, steps
from emberd.compile.residency.trace import CommandTrace, TraceHeader
from emberd.daemon.activation_map import Expert
from emberd.daemon.policies import POLICIES, Policy

LRU, BELADY = POLICIES["lru"], POLICIES["belady"]
MAP = random_map(3, 8, 2)


def command(tokens: int, prompt: int, seed: int = 0) -> CommandTrace:
    """Routing in 3 layers to 2 of 8 experts, some of them more often."""
    draw = np.random.default_rng(seed)
    keys = draw.random((tokens, 3, 8)) + np.linspace(0, 0.6, 8)
    ids = np.argsort(keys, axis=-1)[..., :2].astype(np.uint16)
    return CommandTrace("climate", prompt, ids, np.zeros(ids.shape, np.float16))


def acquirings(taken: Sequence[Step]) -> list[list[Expert]]:
    return [list(needed) for step in taken for needed in step.layers]


def one_layer(*needed: Sequence[int]) -> list[Step]:
    """Steps of a token each that need these experts of the only layer."""
    return [Step(1, [[(0, expert) for expert in experts]]) for experts in needed]


def naive_lru(taken: Sequence[Step], slots: int) -> tuple[int, int]:
    """Hits and reads of a cache that is searched for its oldest entry."""
    clock, used, hits, reads = 0, dict[Expert, int](), 0, 0
    for needed in acquirings(taken):
        there = [expert for expert in needed if expert in used]
        hits += len(there)
        for expert in [*there, *(expert for expert in needed if expert not in there)]:
            if expert not in used:
                reads += 1
                if len(used) == slots:
                    del used[min(used, key=lambda e: used[e])]
            clock += 1
            used[expert] = clock
    return hits, reads


def fewest_reads(taken: Sequence[Step], slots: int) -> int:
    """By trying every set of experts that could stay after every acquiring.

    What is needed is there in its turn, and whatever was read may stay or not.
    """
    needs = [frozenset(needed) for needed in acquirings(taken)]

    @cache
    def least(number: int, resident: frozenset[Expert]) -> int:
        if number == len(needs):
            return 0
        needed = needs[number]
        there = sorted(resident | needed)
        kept = combinations(there, min(slots, len(there)))
        best = min(least(number + 1, frozenset(stay)) for stay in kept)
        return len(needed - resident) + best

    return least(0, frozenset())


def test_steps_cut_prompts_and_take_answers_one_by_one() -> None:
    found = command(9, 6)
    taken = list(steps(found, 4))
    assert [step.tokens for step in taken] == [4, 2, 1, 1, 1]
    assert taken[0].layers[1] == [(1, e) for e in np.unique(found.ids[:4, 1])]
    assert taken[-1].layers[2] == [(2, e) for e in np.unique(found.ids[8, 2])]
    assert [step.tokens for step in steps(found, 512)] == [6, 1, 1, 1]
    assert [step.tokens for step in steps(found, 4, first=5)] == [4, 1]
    assert [step.tokens for step in steps(command(3, 3), 512)] == [3]
    assert [step.tokens for step in steps(command(3, 0), 512)] == [1, 1, 1]


@pytest.mark.parametrize("slots", [2, 5, 6, 7, 11, 24])
@pytest.mark.parametrize("chunk", [1, 5])
def test_lru_is_as_a_naive_model_has_it(slots: int, chunk: int) -> None:
    taken = list(steps(command(60, 30), chunk))
    outcome = replay([("climate", taken)], LRU, slots)
    hits, reads = naive_lru(taken, slots)
    accesses = sum(map(len, acquirings(taken)))
    assert outcome == Outcome(60, accesses, hits, reads)
    assert accesses - hits == reads


@pytest.mark.parametrize("slots", [2, 3, 4])
@pytest.mark.parametrize("seed", range(12))
def test_belady_reads_as_few_as_any_policy_could(slots: int, seed: int) -> None:
    draw = random.Random(seed)
    taken = one_layer(*(draw.sample(range(6), draw.choice((1, 2, 2, 3))) for _ in range(9)))
    outcome = replay([("climate", taken)], BELADY, slots)
    assert outcome.reads == fewest_reads(taken, slots)
    assert outcome.hits == outcome.accesses - outcome.reads


@pytest.mark.parametrize("slots", [2, 6, 10, 16, 24])
@pytest.mark.parametrize("name", [name for name in POLICIES if name != "belady"])
def test_no_policy_reads_less_than_belady(name: str, slots: int) -> None:
    """Ahead of time or not."""
    predictor = available(TraceHeader("ab" * 32, 3, 8, 2, 4096), MAP, None)["token-transitions"]
    commands = [
        ("climate", list(steps(command(40, 10, seed), 4, predictor=predictor))) for seed in range(3)
    ]
    outcome = replay(commands, POLICIES[name], slots, MAP)
    bound = replay(commands, BELADY, slots)
    assert outcome.accesses == bound.accesses
    assert outcome.reads >= bound.reads


def test_a_cache_of_the_whole_bank_reads_each_expert_once() -> None:
    taken = list(steps(command(200, 50), 16))
    used = {expert for needed in acquirings(taken) for expert in needed}
    for policy in (LRU, BELADY):
        assert replay([("climate", taken)], policy, 24).reads == len(used)


def test_pins_stay_whatever_else_is_used() -> None:
    pinned = Policy("pinned", pinned=0.5, by_class=True)
    hot = MAP.hottest(2, MAP.index("climate"))
    others = [(0, e) for e in range(8) if (0, e) not in hot]
    taken = [Step(1, [[expert]]) for expert in [*others, *hot]]
    outcome = replay([("climate", taken)], pinned, 4, MAP)
    assert outcome.hits == 2
    assert outcome.reads == 2 + len(others)


def test_pins_follow_the_class_and_are_read_once() -> None:
    pinned = Policy("pinned", pinned=1.0, by_class=True)
    sets = [set(MAP.hottest(6, MAP.index(name))) for name in ("navigation", "climate")]
    outcome = replay([("navigation", []), ("climate", []), ("climate", [])], pinned, 6, MAP)
    assert outcome.reads == 6 + len(sets[1] - sets[0])


def test_warming_fills_an_empty_cache_in_the_order_of_the_map() -> None:
    warmed = Policy("warmed", warmed=True, by_class=True)
    hot = MAP.hottest(4, MAP.index("climate"))
    again = [Step(1, [[expert]]) for expert in hot]
    assert replay([("climate", again)], warmed, 4, MAP) == Outcome(4, 4, 4, 4)
    cold = next((layer, e) for layer in range(3) for e in range(8) if (layer, e) not in hot)
    evicting = [Step(1, [[cold]]), Step(1, [[hot[0]]]), Step(1, [[hot[3]]])]
    assert replay([("climate", evicting)], warmed, 4, MAP) == Outcome(3, 3, 1, 6)


def test_a_class_that_the_map_has_not_is_warmed_for_any() -> None:
    warmed = Policy("warmed", warmed=True, by_class=True)
    hot = [Step(1, [[expert]]) for expert in MAP.hottest(4)]
    assert replay([("unheard of", hot)], warmed, 4, MAP).hits == 4


def test_cold_commands_begin_with_nothing() -> None:
    taken = one_layer([0, 1], [0, 1])
    for policy in (LRU, BELADY):
        assert replay([("a", taken)] * 3, policy, 4).hits == 10
        assert replay([("a", taken)] * 3, policy, 4, cold=True).hits == 6


def expecting(taken: Sequence[Step], *experts: int) -> list[Step]:
    """The same steps, each of which expects the one of these experts (of 8) in its place."""
    return [
        replace(step, expectation=Expectation.of(multi_hot(np.array([[[expert]]]), 8), 1))
        for step, expert in zip(taken, experts, strict=True)
    ]


def test_what_is_expected_least_is_evicted_first() -> None:
    taken = expecting(one_layer([0], [1], [2], [0]), 0, 0, 0, 7)
    assert replay([("a", taken)], LRU, 2).hits == 0
    assert replay([("a", taken)], replace(LRU, retained=True), 2) == Outcome(4, 4, 1, 3)
    nothing = [replace(step, expectation=None) for step in taken]
    assert replay([("a", nothing)], replace(LRU, retained=True), 2).hits == 0


def test_what_is_expected_least_goes_whichever_was_used_last() -> None:
    taken = expecting(one_layer([0], [1], [2], [0]), 0, 0, 0, 7)
    taken[1:2] = expecting(one_layer([0, 1]), 0)  # 1 is used after 0, and before 2 is read
    assert replay([("a", taken)], replace(LRU, retained=True), 2) == Outcome(4, 5, 2, 3)
    later = [Step(1, [[(0, 1)], [(0, 2)]]), *one_layer([0])]
    outcome = replay([("a", [*taken[:2], *later])], replace(LRU, retained=True), 2)
    assert outcome.hits == 3  # 0 twice, and 1, which makes place for 2 though it was just used


def test_while_a_prompt_is_read_nothing_is_expected() -> None:
    taken = expecting(one_layer([0], [1]), 0, 0)
    for tokens, hits in ((1, 1), (2, 0)):
        step = Step(tokens, [[(0, 2)], [(0, 0)]])
        assert replay([("a", [*taken, step])], replace(LRU, retained=True), 2).hits == hits


def test_nothing_that_is_expected_more_makes_place_for_a_read_ahead() -> None:
    def scores(*values: float) -> Expectation:
        return Expectation.of(np.array([[values]], np.float32), 1)

    first, second = one_layer([0, 1], [2])
    taken = [replace(first, expectation=scores(0.5, 0.1, 0.4)), second]
    wanted = replace(taken[0], expectation=replace(scores(0.5, 0.4, 0.1), likeliest=best_of(2)))
    read_ahead = POLICIES["read-ahead"]
    assert replay([("a", [taken[0], second])], read_ahead, 2).reads == 3
    assert replay([("a", [wanted, *one_layer([0, 1])])], read_ahead, 2) == Outcome(2, 4, 2, 2)


def best_of(*experts: int) -> Experts:
    """The likeliest of a single layer."""
    return np.array([experts], np.uint16)


def test_pins_and_retention_go_together() -> None:
    policy = POLICIES["pinned-retained"]
    (layer, hot), *_ = MAP.hottest(1, MAP.index("climate"))
    others = [expert for expert in range(8) if layer or expert != hot][:3]
    taken = expecting(
        one_layer([others[0]], [others[1]], [others[2]], [others[0]]), *[others[0]] * 4
    )
    outcome = replay([("climate", taken)], policy, 3, MAP)
    assert outcome == Outcome(4, 4, 1, 4)


def test_what_is_expected_most_is_read_ahead() -> None:
    taken = expecting(one_layer([0], [1], [2]), 1, 5, 7)
    assert replay([("a", taken)], POLICIES["read-ahead"], 3) == Outcome(3, 3, 1, 5)


def test_what_is_expected_of_the_next_layer_is_read_at_the_present_one() -> None:
    """Right at the first step, wrong at the second: two layers of one expert each."""
    taken = [
        Step(1, [[(0, 1)], [(1, 2)]], next_layer=[[(1, 2)]]),
        Step(1, [[(0, 3)], [(1, 4)]], next_layer=[[(1, 5)]]),
    ]
    assert replay([("a", taken)], POLICIES["layer-ahead"], 6) == Outcome(2, 4, 1, 5)
    assert replay([("a", taken)], LRU, 6) == Outcome(2, 4, 0, 4)


def test_next_layers_are_expected_at_each_token_of_an_answer() -> None:
    header = TraceHeader("ab" * 32, 3, 8, 2, 4096)
    predictor = available(header, MAP, None)["layer-transitions"]
    found = command(9, 6)
    scores = predictor.scores(found)
    taken = list(steps(found, 4, predictor=predictor))
    assert [len(step.next_layer) for step in taken] == [0, 0, 2, 2, 2]
    for step, token in zip(taken[2:], (6, 7, 8), strict=True):
        assert step.expectation is None
        for layer, expected in enumerate(step.next_layer, start=1):
            assert len(expected) == 2
            assert expected[0] == (layer, scores[token, 0, layer].argmax())


def test_expectations_are_those_after_the_last_token_of_a_step() -> None:
    header = TraceHeader("ab" * 32, 3, 8, 2, 4096)
    predictor = available(header, MAP, None)["token-transitions"]
    found = command(9, 6)
    scores = predictor.scores(found)
    taken = list(steps(found, 4, predictor=predictor))
    for step, last in zip(taken, (3, 5, 6, 7, 8), strict=True):
        assert step.expectation is not None
        np.testing.assert_array_equal(step.expectation.scores, scores[last].sum(axis=0))
        assert step.expectation.likeliest.shape == (3, 2)
        assert step.expectation.likeliest[1, 0] == scores[last, 0, 1].argmax()
