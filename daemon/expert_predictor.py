"""What the next tokens are expected to choose decides which experts stay, and which are read.

An artifact may have a predictor: a small recurrent network, compiled like the model (`emberc build
--predictor`). After every step it reads which experts the tokens chose, and expects some of the
tokens that come. An expert that is expected less makes place for others first; those expected most
of the very next token are read ahead, if the policy says so, while a step needs no others. While
prompts are read, nothing is expected. Results do not depend on it.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from operator import add
from weakref import WeakKeyDictionary

from emberd.daemon.activation_map import Expert
from emberd.daemon.artifact import Artifact
from emberd.daemon.core import PINNED, Model
from emberd.daemon.errors import EmberdError
from emberd.daemon.logits import Logits
from emberd.daemon.session import LogitsRole, Session
from emberd.daemon.trace import RoutingTrace

WINDOW = 16  # tokens, the present one included, that predictors learn to look back on


@dataclass
class _Reading:
    """Where the network stands in a conversation, of which it has read up to `length` tokens."""

    session: Session
    length: int = 0


class ExpertPredictor:
    """Follows the steps of a model from then on, until it is closed.

    It reads the last WINDOW tokens of a step of more, as if nothing had been before; where a
    conversation went back or was reset, too, it begins anew. Of several conversations in a step,
    what is expected of each is added up. A step of others leaves nothing of it.

    Raises EmberdError where the artifact has no predictor, or not one for this model.
    """

    def __init__(self, artifact: Artifact, model: Model, read_ahead: bool) -> None:
        self._model = model
        self._read_ahead = read_ahead
        self._layout = layout = model.experts
        predictor = artifact.predictor()
        self._network = Model(predictor, threads=1)
        self._chosen = layout.layers * layout.top_k  # experts, by a token
        shape = layout.layers * layout.experts, self._chosen
        if (self._network.vocab_size, self._network.max_chunk) != shape:
            raise EmberdError(f"{artifact.path}: its predictor is of another model")
        self._ahead = predictor.program.section_bytes["logits"] // (4 * shape[0])  # tokens
        self._offsets = [i // layout.top_k * layout.experts for i in range(self._chosen)]
        self._pinned = array("i", bytes(4 * shape[0]))  # priorities that nothing is added to
        self._priorities = self._pinned
        self._changing = threading.Lock()  # of both, and of the model's
        self._readings: WeakKeyDictionary[Session, _Reading] = WeakKeyDictionary()
        self._trace = RoutingTrace(model)
        self.memory = self._trace.memory
        model.trace_routing(self)

    def reserve(self, tokens: int, sessions: int) -> None:
        """See core.TraceOwner. What was expected of a few tokens says nothing of a whole prompt."""
        self._trace.reserve(tokens, sessions)
        with self._changing:
            if tokens > sessions and self._priorities != self._pinned:
                self._priorities = self._pinned
                self._model.set_expert_priorities(self._pinned)

    def noted(self, sessions: Sequence[Session]) -> None:
        """Prefers what is expected after a step, if any experts are not in memory."""
        ids = self._trace.take().ids
        if self._model.expert_budget is None:
            return
        flat = ids.cast("B").cast("i")
        each = len(flat) // len(sessions)
        likeliest = array("i")
        with self._changing:
            priorities = self._pinned[:]
            for index, session in enumerate(sessions):
                scores = self._read(session, flat[index * each : (index + 1) * each].tolist())
                likeliest += scores.expect(self._layout, priorities)
            self._priorities = priorities
            self._model.set_expert_priorities(priorities)
        if self._read_ahead:
            # A step comes to the layers in turn.
            self._model.warm_indices(array("i", sorted(likeliest)))

    def pin(self, experts: Sequence[Expert]) -> None:
        """Has these experts, and no others, stay whatever is expected. May be called during a
        step."""
        pinned = array("i", bytes(4 * len(self._pinned)))
        for layer, expert in experts:
            pinned[layer * self._layout.experts + expert] = PINNED
        with self._changing:
            self._pinned = pinned
            before = (0 if priority == PINNED else priority for priority in self._priorities)
            self._priorities = array("i", map(max, pinned, before))
            self._model.set_expert_priorities(self._priorities)

    def _read(self, session: Session, chosen: list[int]) -> Logits:
        """Has the network read what the last tokens of a conversation chose, [tokens * layers *
        top_k]; what it expects then."""
        reading = self._readings.get(session)
        if reading is None:
            network = self._network
            reading = self._readings[session] = _Reading(network.open_session(network.max_context))
        tokens = len(chosen) // self._chosen
        if tokens > WINDOW or reading.length != session.length - tokens:
            reading.session.reset()
            chosen = chosen[-WINDOW * self._chosen :]
        for start in range(0, len(chosen), self._chosen):
            rows = map(add, chosen[start : start + self._chosen], self._offsets)
            reading.session.step(list(rows), LogitsRole.NONE)
        reading.length = session.length
        return Logits(self._network, self._ahead)
