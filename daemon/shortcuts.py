"""What tokens that are decoded may do differently so as to wait less for experts."""

from __future__ import annotations

from dataclasses import dataclass

from emberd.daemon.core import Model
from emberd.daemon.errors import EmberdError


@dataclass(frozen=True)
class Shortcuts:
    """By default none, and answers do not depend on what is in memory.

    `routing_margin`: as in Model.prefer_resident_experts; `stall_deadline` (seconds) and
    `stall_weight`: as in Model.break_stalls.
    """

    routing_margin: float = 0.0
    stall_deadline: float = 0.0
    stall_weight: float = 0.0

    @property
    def wanted(self) -> bool:
        """Whether there are any, for which a model must have been built with moa_fusion."""
        return self.routing_margin > 0 or self.stall_deadline > 0

    def apply(self, model: Model) -> None:
        """From the model's next step on. Raises EmberdError for values out of bounds, or for some
        with a model that was built without moa_fusion."""
        model.prefer_resident_experts(self.routing_margin)
        model.break_stalls(self.stall_deadline, self.stall_weight)


def refusal(model: Model) -> str:
    """Why a model takes no shortcuts; empty if it does. Those that it is to take must be applied
    after this."""
    try:
        Shortcuts(routing_margin=1.0).apply(model)
    except EmberdError as error:
        return str(error)
    return ""
