"""The predictors that can be made of what is given."""

from __future__ import annotations

from pathlib import Path

from emberd.compile.predict.lstm import Lstm
from emberd.compile.predict.map_ranking import MapRanking
from emberd.compile.predict.map_transitions import LayerTransitions, TokenTransitions
from emberd.compile.predict.next_router import NextRouter
from emberd.compile.predict.predictor import Predictor
from emberd.compile.predict.previous_token import PreviousToken
from emberd.compile.predict.window import Window
from emberd.compile.residency.trace import TraceHeader
from emberd.daemon.activation_map import ActivationMap


def available(
    header: TraceHeader, found: ActivationMap | None, lstm: Path | None
) -> dict[str, Predictor]:
    """By name, for traces with this header: those that need an activation map, a trained network
    or what routers expected only with it. Raises EmberdError where one is of another model."""
    predictors: list[Predictor] = [PreviousToken(header), Window(header)]
    if found is not None:
        found.check_model(header.model)
        predictors += [MapRanking(found), TokenTransitions(found), LayerTransitions(found)]
    if header.next_layer:
        predictors.append(NextRouter(header))
    if lstm is not None:
        predictors.append(Lstm(lstm, header))
    return {predictor.name: predictor for predictor in predictors}
