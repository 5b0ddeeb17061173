"""Which experts a model's tokens choose: a trace notes the routing of all steps while entered."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from emberd.daemon.bindings import Trace
from emberd.daemon.core import Model
from emberd.daemon.session import Session

_TOKENS_AT_FIRST = 64


@dataclass(frozen=True)
class Routing:
    """`ids` int32 and `weights` float32, both [tokens, layers, top_k]: each token's experts in
    every layer, the heaviest first, and what they weigh (summing to 1)."""

    ids: memoryview[int]
    weights: memoryview[float]


class RoutingTrace:
    """Notes the routing of every token of `model` between entering and leaving; one at a time.

    Tokens are noted in the order in which they are run, those of a batch in that of its sessions;
    a step that fails notes none. Memory doubles as it fills (8 bytes x layers x top_k a token);
    `take` empties it. Raises EmberdError on entering when the model is closed, or was built without
    moa_fusion.
    """

    def __init__(self, model: Model) -> None:
        self.memory = Trace()
        self._model = model
        self._shape = (model.experts.layers, model.experts.top_k)
        self._ids = array("i")
        self._weights = array("f")

    def __enter__(self) -> RoutingTrace:
        self._model.trace_routing(self)
        return self

    def __exit__(self, *error: object) -> None:
        self._model.trace_routing(None)

    @property
    def tokens(self) -> int:
        """How many tokens are noted."""
        return int(self.memory.tokens)

    def reserve(self, tokens: int, sessions: int) -> None:
        """Makes room for so many more tokens: the model asks for it before every step."""
        memory = self.memory
        needed = memory.tokens + tokens
        if needed <= memory.capacity:
            return
        capacity = max(needed, 2 * memory.capacity, _TOKENS_AT_FIRST)
        more = bytes((capacity - memory.capacity) * self._token_bytes)
        self._ids.frombytes(more)
        self._weights.frombytes(more)
        memory.ids, _ = self._ids.buffer_info()
        memory.weights, _ = self._weights.buffer_info()
        memory.capacity = capacity

    def noted(self, sessions: Sequence[Session]) -> None:
        """What was noted stays until `take`."""

    def take(self) -> Routing:
        """What was noted since the last call, which is then forgotten; not during a step."""
        size = self.tokens * self._token_bytes
        shape = (self.tokens, *self._shape)
        self.memory.tokens = 0
        return Routing(
            ids=memoryview(memoryview(self._ids).cast("B")[:size].tobytes()).cast("i", shape),
            weights=memoryview(memoryview(self._weights).cast("B")[:size].tobytes()).cast(
                "f", shape
            ),
        )

    @property
    def _token_bytes(self) -> int:
        layers, top_k = self._shape
        return int(layers * top_k * self._ids.itemsize)
