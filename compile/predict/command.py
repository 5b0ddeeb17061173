"""`emberc predict`: how well each predictor of routing expects what a recorded trace chose."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from emberd.compile.files import write_whole
from emberd.compile.predict.available import available
from emberd.compile.predict.lstm import Lstm
from emberd.compile.predict.network import to_onnx
from emberd.compile.predict.recall import Recall, measure
from emberd.compile.residency.trace import Trace, TraceHeader
from emberd.daemon.activation_map import ActivationMap
from emberd.daemon.errors import EmberdError

_STEPS = 4000
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
    parser.add_argument(
        "--lstm", type=Path, metavar="FILE.onnx", help="network that was trained on other traces"
    )
    parser.add_argument(
        "--train",
        type=Path,
        metavar="TRACE",
        help="first train the network on this trace and write it to --lstm (needs torch: pip "
        "install 'emberd[train]')",
    )
    parser.add_argument(
        "--steps", type=int, default=_STEPS, help="of the training (default %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(arguments: argparse.Namespace) -> None:
    trace = Trace(arguments.trace)
    header = trace.header
    found = None if arguments.map is None else ActivationMap.read(arguments.map)
    commands = list(trace)
    if not commands:
        raise EmberdError(f"{arguments.trace}: no commands")
    if arguments.train is not None:
        if arguments.lstm is None:
            raise EmberdError("--train: say with --lstm where to write the network")
        _train(arguments.train, arguments.lstm, arguments.steps)
    predictors = available(header, found, arguments.lstm)
    budgets = [header.top_k, min(2 * header.top_k, header.experts)]
    rows = [
        row
        for predictor in predictors.values()
        for row in measure(predictor, commands, header, budgets)
    ]
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        print(table(rows, header))
        for predictor in predictors.values():
            if isinstance(predictor, Lstm):
                weights = predictor.weights
                print(
                    f"lstm: {weights.count} weights, {weights.multiplications} multiplications a "
                    "token"
                )


def _train(path: Path, output: Path, steps: int) -> None:
    """Raises EmberdError without torch, and where a trace has nothing to learn."""
    if steps < 1:
        raise EmberdError(f"--steps {steps}: expected 1 or more")
    try:
        from emberd.compile.predict.train import train
    except ModuleNotFoundError as error:
        raise EmberdError(
            f"--train: {error.name} is not installed: pip install 'emberd[train]'"
        ) from None
    trace = Trace(path)
    commands = [command for command in trace if len(command.ids) > 1]
    if not commands:
        raise EmberdError(f"{path}: no command of two tokens or more")
    data = to_onnx(train(trace.header, commands, steps).weights(), trace.header)
    write_whole(output, lambda file: file.write(data.SerializeToString()))
