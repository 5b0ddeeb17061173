"""What the engine needs from a model: the native core satisfies it, and so does any stand-in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable


class LogitsView(Protocol):
    """float32 [rows, vocab_size]; valid until the model's next step."""

    @property
    def rows(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    def bias(self, biases: Mapping[int, float], row: int = -1) -> None:
        """Add to the logit of each token what ``biases`` says."""

    def get(self, token: int, row: int = -1) -> float:
        """One logit."""

    def top(self, k: int, row: int = -1) -> tuple[list[int], list[float]]:
        """The ``k`` largest logits, descending, ties to the lower id: ids and values."""

    def log_sum_exp(self, row: int = -1) -> float:
        """log(sum(exp(logits))) over the vocabulary."""

    def draw(
        self,
        uniform: float,
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
        row: int = -1,
    ) -> int:
        """The token at ``uniform`` in [0, 1) of the distribution that the filters leave, in
        descending order, or in that of the ids where there is no filter; the likeliest at
        temperature 0. Raises EmberdError where no logit is finite."""


class SessionLike(Protocol):
    """One conversation's state in the model."""

    @property
    def length(self) -> int: ...

    def step(self, tokens: Sequence[int], logits: Any = ...) -> LogitsView | None: ...

    def snapshot(self) -> Any: ...

    def restore(self, snapshot: Any) -> None: ...

    def reset(self) -> None: ...

    def close(self) -> None: ...


class ModelLike(Protocol):
    """A loaded model."""

    @property
    def max_chunk(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_context(self) -> int: ...

    def open_session(self, capacity: int) -> SessionLike: ...

    def step_batch(self, sessions: Sequence[Any], tokens: Sequence[int]) -> LogitsView:
        """Append one token to each of the sessions; a row of logits for each."""

    def close(self) -> None: ...


class ExpertLayoutLike(Protocol):
    """How a model's experts lie and are chosen, the same in all layers."""

    @property
    def layers(self) -> int: ...

    @property
    def experts(self) -> int: ...

    @property
    def top_k(self) -> int: ...

    @property
    def expert_bytes(self) -> int: ...


class ExpertCountersLike(Protocol):
    """What the experts of a layer have cost."""

    @property
    def hits(self) -> int: ...

    @property
    def misses(self) -> int: ...

    @property
    def bytes(self) -> int: ...

    @property
    def stall_nanoseconds(self) -> int: ...

    @property
    def skipped(self) -> int: ...

    @property
    def substituted(self) -> int: ...

    @property
    def expected(self) -> int: ...

    @property
    def expected_used(self) -> int: ...


@runtime_checkable
class WatchableExperts(Protocol):
    """A model that tells about its experts; all of it may be asked for during a step."""

    @property
    def experts(self) -> ExpertLayoutLike: ...

    @property
    def expert_budget(self) -> int | None: ...

    @property
    def token_demand(self) -> int: ...

    def expert_counters(self) -> Sequence[ExpertCountersLike]:
        """Of each layer."""

    def resident_experts(self) -> Sequence[int]:
        """Whether each expert is in memory, [layers * experts]."""

    def chosen_experts(self) -> Sequence[int]:
        """How many tokens chose each, [layers * experts]."""
