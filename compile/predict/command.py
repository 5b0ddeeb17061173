"""`emberc predict`: how well each predictor of routing expects what a recorded trace chose."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from emberd.compile.predict.available import available
from emberd.compile.predict.recall import Recall, measure
from emberd.compile.residency.trace import Trace, TraceHeader
from emberd.daemon.activation_map import ActivationMap
from emberd.daemon.errors import EmberdError

_HEADS = {0: "next layer", 1: "t+1", 2: "t+2", 3: "t+3"}


def table(rows: Sequence[Recall], header: TraceHeader) -> str:
    """A line a predictor, a column a horizon, with the recall of each budget in turn."""
    budgets = sorted({row.budget for row in rows})
    predictors = list(dict.fromkeys(row.predictor for row in rows))
    recalls = {(row.predictor, row.horizon, row.budget): row.recall for row in rows}
    width = max(map(len, predictors))
    column = 7 * len(budgets)
    lines = [
        f"{header.layers} layers of {header.experts} experts, {header.top_k} chosen; recall of "
        f"generated tokens with {' and '.join(map(str, budgets))} predicted of each layer",
        "",
        "  ".join([f"{'predictor':<{width}}", *(f"{head:>{column}}" for head in _HEADS.values())]),
    ]
    for name in predictors:
        cells = [
            "".join(f"{recalls[name, horizon, budget]:7.1%}" for budget in budgets)
            if (name, horizon, budgets[0]) in recalls
            else f"{'-':>{column}}"
            for horizon in _HEADS
        ]
        lines.append("  ".join([f"{name:<{width}}", *cells]))
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", type=Path, help="file written by emberc profile --trace")
    parser.add_argument("--map", type=Path, help="activation map, for the predictors that need one")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(arguments: argparse.Namespace) -> None:
    trace = Trace(arguments.trace)
    header = trace.header
    found = None if arguments.map is None else ActivationMap.read(arguments.map)
    if found is not None:
        found.check_model(header.model)
    commands = list(trace)
    if not commands:
        raise EmberdError(f"{arguments.trace}: no commands")
    budgets = [header.top_k, min(2 * header.top_k, header.experts)]
    rows = [
        row
        for predictor in available(header, found).values()
        for row in measure(predictor, commands, header, budgets)
    ]
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        print(table(rows, header))
