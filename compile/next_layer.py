"""The calls that ask a layer's hidden state which experts the next layer will choose.

A token's hidden state changes little from layer to layer, so that the next router, asked early,
names many of the experts that it will choose (Eliseev and Mazur 2023, "Fast inference of
mixture-of-experts language models with offloading"). Its norm and router are the present layer's
kernels with the next layer's weights, and with memory of their own for what they make.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from emberd.compile.block_program import ITEM_BYTES, BlockProgram, Call, Tensor
from emberd.compile.passes.lower_kernels import ACQUIRE_EXPERTS

_NORM, _ROUTER = "rms_norm_", "router_"
_RESULTS = 2  # both kernels take (x, weight), then what they make


@dataclass(frozen=True)
class NextLayer:
    """`calls`: as in BlockProgram, of which weights are the next layer's; `ids`: the experts that
    they choose; `storages`: the block's, and after them those of `calls`."""

    calls: list[Call]
    ids: Tensor
    storages: list[int]


def ask_next_layer(block: BlockProgram) -> NextLayer | None:
    """The calls for a block that acquires experts; None for one whose router is not a kernel."""
    acquire = next(
        (at for at, (symbol, _) in enumerate(block.calls) if ACQUIRE_EXPERTS in symbol), 0
    )
    before = block.calls[:acquire]
    router = _maker(before, block.calls[acquire][1][0], _ROUTER) if before else None
    norm = None if router is None else _maker(before, router[1][0], _NORM)
    if norm is None or router is None:
        return None
    storages = list(block.storages)
    normed = _own_results(norm, storages)
    symbol, (_, weight, *results) = _own_results(router, storages)
    asked = symbol, [normed[1][_RESULTS], weight, *results]
    return NextLayer([normed, asked], results[0], storages)


def _maker(calls: list[Call], result: Tensor, kernel: str) -> Call | None:
    """The call of such a kernel that makes a result, if the last one to make it is one."""
    for symbol, arguments in reversed(calls):
        if _place(result) in map(_place, arguments[_RESULTS:]):
            return (symbol, arguments) if symbol.startswith(kernel) else None
    return None


def _place(tensor: Tensor) -> tuple[str | int, int]:
    return tensor.storage, tensor.offset


def _own_results(call: Call, storages: list[int]) -> Call:
    """The call with its results in storages that are added."""
    symbol, arguments = call
    own = []
    for tensor in arguments[_RESULTS:]:
        own.append(replace(tensor, storage=len(storages), offset=0))
        storages.append(math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype])
    return symbol, [*arguments[:_RESULTS], *own]
