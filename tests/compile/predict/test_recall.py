"""Recall where the right one is known, and predictors that know no future."""

from __future__ import annotations

import numpy as np
import pytest
from emberd.compile.predict.available import available
from emberd.compile.predict.map_ranking import MapRanking
from emberd.compile.predict.predictor import Predictor
from emberd.compile.predict.recall import measure
from emberd.compile.residency.trace import CommandTrace, TraceHeader
from emberd.daemon.errors import EmberdError
from routed_commands import CYCLE, command, counted, cycle, noise

LEARNT = counted(CYCLE, [cycle(300, 0)])
RANDOM = TraceHeader("ab" * 32, layers=3, experts=8, top_k=3, expert_bytes=4096)
NAMES = ["previous-token", "window", "map-ranking", "token-transitions", "layer-transitions"]


def predictor(name: str) -> Predictor:
    return available(CYCLE, LEARNT, None)[name]


def recalls(name: str, found: CommandTrace, budget: int) -> list[float]:
    return [row.recall for row in measure(predictor(name), [found], CYCLE, [budget])]


@pytest.mark.parametrize(
    ("name", "budget", "right"),
    [
        # What comes after a token was chosen two tokens before it, and then one before it.
        ("previous-token", 2, [0, 0, 1]),
        ("previous-token", 4, [0, 1, 1]),
        ("window", 2, [0, 0, 1]),  # 6 of the last 16 tokens are like the present one
        ("map-ranking", 2, [1 / 3, 1 / 3, 1 / 3]),
        ("map-ranking", 4, [2 / 3, 2 / 3, 2 / 3]),
        ("token-transitions", 2, [1, 1, 1]),
        ("layer-transitions", 2, [1]),
    ],
)
def test_recall_of_a_cycle_is_known(name: str, budget: int, right: list[float]) -> None:
    assert recalls(name, cycle(64, 34), budget) == pytest.approx(right)


def test_only_tokens_that_were_generated_count() -> None:
    """A prompt of noise is not judged, but is what the first of them are predicted from."""
    ids = np.concatenate([noise(CYCLE, 40, 0, 1).ids, cycle(20, 0).ids])
    for generated, right in ((0, 0), (1, 1), (2, 2), (3, 3)):
        found = recalls("token-transitions", command(ids, 40 + generated), 2)
        assert [recall == 1 for recall in found] == [number < right for number in range(3)]


@pytest.mark.parametrize("name", NAMES)
def test_all_experts_predicted_are_all_found(name: str) -> None:
    assert set(recalls(name, noise(CYCLE, 30, 10, 0), CYCLE.experts)) == {1.0}


@pytest.mark.parametrize("name", NAMES)
def test_no_predictor_knows_the_future(name: str) -> None:
    found = noise(CYCLE, 40, 10, 0)
    scores = predictor(name).scores(found)
    assert scores.shape == (40, len(predictor(name).horizons), 2, 6)
    changed = found.ids.copy()
    changed[20:] = noise(CYCLE, 20, 0, 5).ids
    np.testing.assert_array_equal(predictor(name).scores(command(changed, 10))[:20], scores[:20])


def test_the_next_layer_is_predicted_from_those_before() -> None:
    found = noise(CYCLE, 40, 10, 0)
    changed = found.ids.copy()
    changed[:, 1] = noise(CYCLE, 40, 0, 5).ids[:, 1]
    one, other = (predictor("layer-transitions").scores(c) for c in (found, command(changed, 10)))
    np.testing.assert_array_equal(one, other)


def test_window_counts_the_last_sixteen() -> None:
    found = noise(RANDOM, 50, 10, 0)
    scores = available(RANDOM, None, None)["window"].scores(found)
    for token in range(50):
        for layer in range(3):
            seen = found.ids[max(0, token - 15) : token + 1, layer].ravel()
            expected = np.bincount(seen, minlength=8)
            for ahead in range(3):
                np.testing.assert_array_equal(scores[token, ahead, layer], expected)


def test_the_latest_are_first_and_of_a_token_the_heavier() -> None:
    ids = np.array([[[4, 1, 0]], [[1, 5, 2]], [[6, 2, 7]]], np.uint16)
    header = TraceHeader("ab" * 32, layers=1, experts=9, top_k=3, expert_bytes=4096)
    scores = available(header, None, None)["previous-token"].scores(command(ids, 0))
    assert np.argsort(-scores[2, 0, 0], kind="stable")[:7].tolist() == [6, 2, 7, 1, 5, 4, 0]
    assert (scores[2, 0, 0, [3, 8]] == 0).all()


def test_what_is_long_ago_is_forgotten() -> None:
    ids = np.array([[[8]]] + [[[1]]] * 16, np.uint16)
    header = TraceHeader("ab" * 32, layers=1, experts=9, top_k=1, expert_bytes=4096)
    scores = available(header, None, None)["previous-token"].scores(command(ids, 0))
    assert scores[15, 0, 0, 8] > 0 and scores[16, 0, 0, 8] == 0


def test_later_tokens_are_expected_by_the_transitions_of_the_next() -> None:
    """0 is followed by 1 three times of four and else by 2; 1 by 2, and 2 by 0."""
    header = TraceHeader("ab" * 32, layers=1, experts=3, top_k=1, expert_bytes=4096)
    ids = np.array([0, 1, 2, 0, 1, 2, 0, 2, 0, 1, 2] * 40, np.uint16).reshape(-1, 1, 1)
    learnt = counted(header, [command(ids, 0)])
    scores = available(header, learnt, None)["token-transitions"].scores(command(ids[:1], 0))
    expected = [[0, 0.75, 0.25], [0.25, 0, 0.75], [0.75, 0.1875, 0.0625]]
    np.testing.assert_allclose(scores[0, :, 0], expected, atol=2e-3)


def test_a_class_that_the_map_has_not_is_ranked_as_any() -> None:
    one = command(cycle(30, 0).ids[::3], 0, "zero")
    other = command(cycle(30, 0, start=1).ids[::3], 0, "one")
    ranking = MapRanking(counted(CYCLE, [one, other]))
    assert set(np.flatnonzero(ranking.scores(one)[0, 0, 0])) == {0, 1}
    unknown = command(one.ids, 0, "unheard of")
    assert set(np.flatnonzero(ranking.scores(unknown)[0, 0, 0])) == {0, 1, 2, 3}


def test_a_trace_without_answers_is_refused() -> None:
    with pytest.raises(EmberdError, match="no answers"):
        measure(predictor("window"), [cycle(30, 30)], CYCLE, [2])
    with pytest.raises(EmberdError, match="no answers"):
        measure(predictor("window"), [cycle(2, 0)], CYCLE, [2])
