"""emberd under measurement, in process: artifact, model and sessions as the daemon uses them."""

from __future__ import annotations

import json
import time
from pathlib import Path

from emberd.daemon.activation_map import ActivationMap
from emberd.daemon.artifact import Artifact
from emberd.daemon.experts import Residency
from emberd.daemon.policies import followed
from emberd.daemon.trace import RoutingTrace

from bench.tokens import Tokens

READERS = 4  # threads, as the daemon has by default


class EmberdSide:
    """See worker.Side."""

    def start(
        self,
        path: str,
        threads: int,
        context: int,
        streams: int,
        prompt: int,
        expert_budget: int | None = None,
    ) -> float:
        start = time.perf_counter()
        self.open(path, threads, context, streams, expert_budget)
        logits = self._sessions[0].prefill(self._tokens.take(prompt))
        assert logits is not None
        logits.top(1)
        return time.perf_counter() - start

    def clear(self) -> float:
        for session in self._sessions:
            session.reset()
        return 0.0

    def open(
        self,
        path: str,
        threads: int,
        context: int,
        streams: int = 1,
        expert_budget: int | None = None,
        activation_map: str | None = None,
        expert_policy: str = "",
    ) -> float:
        """Load, and begin to read ahead what the map says, if there is one. Without the name of a
        policy, it is that of artifacts that name none."""
        start = time.perf_counter()
        known = None if activation_map is None else ActivationMap.read(Path(activation_map))
        policy = followed(expert_policy)
        self._residency = Residency(expert_budget, READERS, known, policy=policy)
        self._model = self._residency.open(Artifact.open(Path(path)), threads)
        self._tokens = Tokens(self._model.vocab_size)
        self._sessions = [self._model.open_session(context) for _ in range(streams)]
        return time.perf_counter() - start

    def answer(self, prompt: int, count: int) -> float:
        """A prompt of so many tokens and so many more, as the daemon answers."""
        start = time.perf_counter()
        self._residency.prompt_begins()
        self.prefill(prompt)
        self._residency.prompt_read()
        self.decode(count)
        self._residency.at_rest()
        return time.perf_counter() - start

    def turn_to(self, topic: int, topics: int) -> float:
        self._tokens.turn_to(topic, topics)
        return 0.0

    def prefill(self, count: int) -> float:
        tokens = self._tokens.take(count)
        start = time.perf_counter()
        self._sessions[0].prefill(tokens)
        return time.perf_counter() - start

    def decode(self, count: int) -> float:
        streams = len(self._sessions)
        tokens = self._tokens.take(count * streams)
        start = time.perf_counter()
        for first in range(0, len(tokens), streams):
            self._model.step_batch(self._sessions, tokens[first : first + streams])
        return time.perf_counter() - start

    def record(self, count: int, path: str) -> float:
        """Decode from an empty expert store, with nothing read before it is asked for;
        writes to `path` what it found in memory, {hits, misses, expert_bytes}, and the experts that
        were asked for, ids [tokens, layers, top_k]."""
        budget = self._model.expert_budget
        self._model.set_expert_budget(None)
        self._model.set_expert_budget(budget)
        self._model.expect_experts(False)
        before = self._model.expert_counters()
        with RoutingTrace(self._model) as trace:
            seconds = self.decode(count)
        self._model.expect_experts(self._residency.policy.layer_ahead)
        after = self._model.expert_counters()
        found = {
            "hits": sum(c.hits for c in after) - sum(c.hits for c in before),
            "misses": sum(c.misses for c in after) - sum(c.misses for c in before),
            "expert_bytes": self._model.experts.expert_bytes,
            "ids": trace.take().ids.tolist(),
        }
        Path(path).write_text(json.dumps(found), encoding="utf-8")
        return seconds

    def fill(self, count: int) -> float:
        return self.prefill(count - self._sessions[0].length)
