"""How much of what tokens chose a predictor had expected."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from emberd.compile.predict.predictor import Predictor, best, multi_hot
from emberd.compile.residency.trace import CommandTrace, TraceHeader
from emberd.daemon.errors import EmberdError


@dataclass(frozen=True)
class Recall:
    """`recall`: of the experts chosen `horizon` tokens later, the share that was among the
    `budget` predicted of each layer; over all layers and tokens."""

    predictor: str
    horizon: int
    budget: int
    recall: float


def measure(
    predictor: Predictor,
    commands: Iterable[CommandTrace],
    header: TraceHeader,
    budgets: Sequence[int],
) -> list[Recall]:
    """The recall of tokens that were generated, since prompts are read many tokens at a time.

    With horizon 0 of all layers but the first. Raises EmberdError where there is nothing to
    predict.
    """
    found = {(horizon, budget): 0 for horizon in predictor.horizons for budget in budgets}
    chosen = dict.fromkeys(predictor.horizons, 0)
    for command in commands:
        scores = predictor.scores(command)
        actual = multi_hot(command.ids, header.experts)
        for index, horizon in enumerate(predictor.horizons):
            layers = slice(0 if horizon else 1, None)
            first = max(command.prompt, horizon)
            wanted = actual[first:, layers]
            made = scores[first - horizon : max(len(scores) - horizon, 0), index, layers]
            chosen[horizon] += int(wanted.sum())
            for budget in budgets:
                expected = multi_hot(best(made, budget), header.experts)
                found[horizon, budget] += int((expected * wanted).sum())
    if not all(chosen.values()):
        raise EmberdError(
            f"{predictor.name}: nothing to predict: the trace has no answers of more than a few "
            "tokens; record one of commands that come without their answers"
        )
    return [
        Recall(predictor.name, horizon, budget, count / chosen[horizon])
        for (horizon, budget), count in found.items()
    ]
