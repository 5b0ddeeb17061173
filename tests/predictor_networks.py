"""Networks of the lstm predictor that have learnt nothing."""

from __future__ import annotations

import numpy as np
from emberd.compile.predict.network import Weights
from emberd.compile.predict.predictor import AHEAD
from emberd.compile.residency.trace import TraceHeader


def random_weights(header: TraceHeader, embedding: int, state: int, scale: float = 0.3) -> Weights:
    """For traces with this header: weights of a normal distribution."""
    draw = np.random.default_rng(0)
    experts = header.layers * header.experts
    shapes = {
        "embedding": (experts, embedding),
        "input_weight": (4 * state, embedding),
        "state_weight": (4 * state, state),
        "gate_bias": (4 * state,),
        "ahead_weight": (AHEAD * embedding, state),
        "ahead_bias": (AHEAD * embedding,),
        "score_bias": (AHEAD, experts),
    }
    factor = np.float32(scale)
    return Weights(
        **{name: draw.standard_normal(shape, np.float32) * factor for name, shape in shapes.items()}
    )
