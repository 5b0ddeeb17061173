"""Commands for tests, routed so regularly that what is right is known."""

from __future__ import annotations

import numpy as np
from emberd.compile.residency.counts import RoutingCounts
from emberd.compile.residency.trace import CommandTrace, TraceHeader
from emberd.daemon.activation_map import ActivationMap
from numpy.typing import NDArray

CYCLE = TraceHeader("ab" * 32, layers=2, experts=6, top_k=2, expert_bytes=4096)


def cycle(tokens: int, prompt: int, start: int = 0) -> CommandTrace:
    """Three pairs of experts take turns: in the first layer 01 23 45, in the second 45 01 23."""
    turn = (np.arange(start, start + tokens)[:, None] + [0, 2]) % 3
    ids = np.stack([2 * turn, 2 * turn + 1], axis=-1).astype(np.uint16)
    return command(ids, prompt)


def noise(header: TraceHeader, tokens: int, prompt: int, seed: int) -> CommandTrace:
    """Every expert as likely as any other, whatever came before."""
    draw = np.random.default_rng(seed)
    keys = draw.random((tokens, header.layers, header.experts))
    return command(np.argsort(keys, axis=-1)[..., : header.top_k].astype(np.uint16), prompt)


def command(ids: NDArray[np.uint16], prompt: int, name: str = "climate") -> CommandTrace:
    return CommandTrace(name, prompt, ids, np.full(ids.shape, 1 / ids.shape[-1], np.float16))


def counted(header: TraceHeader, commands: list[CommandTrace]) -> ActivationMap:
    """The map of these commands."""
    counts = RoutingCounts(header.layers, header.experts, header.top_k)
    for one in commands:
        counts.add(one.command_class, one.ids)
    return counts.to_map(header.model)
