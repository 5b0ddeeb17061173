"""Where routers have to decide between experts of nearly equal scores.

There, how the last bits were rounded decides which expert is taken, and with it what follows. No
two implementations agree on that, so parity is tested on prompts that are routed clearly.
"""

from __future__ import annotations

import numpy as np
from emberd.compile.oracle import Oracle


class RouterWatch:
    """Notes how close the scores of the last expert taken and of the first one left out came.

    Scores are what the softmax takes: with the tiny models, of the order of 1.
    """

    def __init__(self, oracle: Oracle) -> None:
        self.closest = np.inf
        self._dimensions = oracle.model.dimensions
        self._run = oracle.run
        oracle.run = self._watched_run

    def _watched_run(self, block: str, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
        top_k = self._dimensions.moe.top_k
        if block == "moe" and top_k < self._dimensions.moe.experts:
            hidden = inputs["hidden"]
            mean_square = (hidden**2).mean(-1, keepdims=True)
            normed = hidden / np.sqrt(mean_square + self._dimensions.eps)
            scores = -np.sort(-(normed * (1 + inputs["post_norm"]) @ inputs["router"].T))
            self.closest = min(self.closest, (scores[:, top_k - 1] - scores[:, top_k]).min())
        return self._run(block, inputs)


def clear_prompt(oracle: Oracle, length: int, gap: float) -> tuple[np.ndarray, np.ndarray]:
    """A random prompt i32[length] on which no router meets scores closer than `gap`, and its
    logits f32[length, V]."""
    watch, session = RouterWatch(oracle), oracle.session()
    generator = np.random.default_rng(0)
    tokens: list[int] = []
    rows: list[np.ndarray] = []
    while len(tokens) < length:
        token = int(generator.integers(oracle.model.dimensions.vocab_size))
        trial = session.fork()
        watch.closest = np.inf
        row = trial.step([token])
        if watch.closest > gap:
            session = trial
            tokens.append(token)
            rows.append(row)
    return np.array(tokens, np.int32), np.concatenate(rows)
