"""What each kernel of a model costs: a profile counts calls and time while it is entered."""

from __future__ import annotations

from dataclasses import dataclass

from emberd.daemon.bindings import Cost
from emberd.daemon.core import Model

ACQUIRE_EXPERTS = "acquire_experts"


@dataclass(frozen=True)
class KernelCost:
    """One kernel, or ACQUIRE_EXPERTS: how often it was called and how long that took in all."""

    symbol: str
    calls: int
    seconds: float


class Profile:
    """Times every step of `model` between entering and leaving its context; one at a time.

    Timing takes two readings of the clock per step, about 0.1 us. Raises EmberdError on entering
    when the model is closed.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._symbols = (*model.symbols, ACQUIRE_EXPERTS)
        self._costs = (Cost * len(self._symbols))()

    def __enter__(self) -> Profile:
        self._model.time_steps(self._costs)
        return self

    def __exit__(self, *error: object) -> None:
        self._model.time_steps(None)

    def costs(self) -> list[KernelCost]:
        """The kernels that were called, the most expensive first."""
        called = [
            KernelCost(symbol, cost.calls, cost.nanoseconds / 1e9)
            for symbol, cost in zip(self._symbols, self._costs, strict=True)
            if cost.calls
        ]
        return sorted(called, key=lambda cost: cost.seconds, reverse=True)
