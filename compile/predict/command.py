"""`emberc predict`: how well each predictor of routing expects what a recorded trace chose."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from emberd.compile.predict.available import available
from emberd.compile.predict.lstm import Lstm
from emberd.compile.predict.next_router import NextRouter
from emberd.compile.predict.predictor import Predictor
from emberd.compile.predict.recall import Recall, measure
from emberd.compile.residency.trace import CommandTrace, Trace, TraceHeader
from emberd.daemon.activation_map import ActivationMap
from emberd.daemon.errors import EmberdError

_TIMED = 50  # commands
_HEADS = {0: "next layer", 1: "t+1", 2: "t+2", 3: "t+3"}


def microseconds(
    predictor: Predictor, commands: Sequence[CommandTrace], header: TraceHeader
) -> float | None:
    """What a prediction costs on this machine, on one thread, for a token's layers together: the
    network as the core runs it, once compiled; others in numpy. None where a trace cannot tell, as
    with routers that were asked while it was recorded."""
    if isinstance(predictor, NextRouter):
        return None
    if isinstance(predictor, Lstm):
        return predictor.compiled_microseconds(commands[0])
    start = time.perf_counter()
    tokens = sum(len(predictor.scores(command)) for command in commands[:_TIMED])
    return (time.perf_counter() - start) / tokens * 1e6


def table(rows: Sequence[Recall], costs: Mapping[str, float | None], header: TraceHeader) -> str:
    """A line a predictor, a column a horizon, with the recall of each budget in turn, and a last
    one with what it costs, in microseconds a token."""
    budgets = sorted({row.budget for row in rows})
    predictors = list(dict.fromkeys(row.predictor for row in rows))
    recalls = {(row.predictor, row.horizon, row.budget): row.recall for row in rows}
    width = max(map(len, predictors))
    column = 7 * len(budgets)
    heads = [f"{head:>{column}}" for head in _HEADS.values()]
    lines = [
        f"{header.layers} layers of {header.experts} experts, {header.top_k} chosen; recall of "
        f"generated tokens with {' and '.join(map(str, budgets))} predicted of each layer",
        "",
        "  ".join([f"{'predictor':<{width}}", *heads, f"{'us/token':>8}"]),
    ]
    for name in predictors:
        cells = [
            "".join(f"{recalls[name, horizon, budget]:7.1%}" for budget in budgets)
            if (name, horizon, budgets[0]) in recalls
            else f"{'-':>{column}}"
            for horizon in _HEADS
        ]
        cost = costs[name]
        cells.append(f"{'-':>8}" if cost is None else f"{cost:8.1f}")
        lines.append("  ".join([f"{name:<{width}}", *cells]))
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", type=Path, help="file written by emberc profile --trace")
    parser.add_argument("--map", type=Path, help="activation map, for the predictors that need one")
    parser.add_argument(
        "--lstm",
        type=Path,
        metavar="FILE.onnx",
        help="network that emberc profile --train has written, from other commands",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(arguments: argparse.Namespace) -> None:
    trace = Trace(arguments.trace)
    header = trace.header
    found = None if arguments.map is None else ActivationMap.read(arguments.map)
    commands = list(trace)
    if not commands:
        raise EmberdError(f"{arguments.trace}: no commands")
    predictors = available(header, found, arguments.lstm)
    budgets = [header.top_k, min(2 * header.top_k, header.experts)]
    rows = [
        row
        for predictor in predictors.values()
        for row in measure(predictor, commands, header, budgets)
    ]
    costs = {name: microseconds(one, commands, header) for name, one in predictors.items()}
    if arguments.json:
        members = [asdict(row) | {"microseconds": costs[row.predictor]} for row in rows]
        print(json.dumps(members, indent=2))
    else:
        print(table(rows, costs, header))
