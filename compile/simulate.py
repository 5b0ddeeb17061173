"""`emberc simulate`: what share of the experts a policy would find in memory, by budget."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from emberd.compile.files import write_whole
from emberd.compile.predict.available import available
from emberd.compile.predict.predictor import Predictor
from emberd.compile.residency.plot import curves
from emberd.compile.residency.replay import Step, replay, steps
from emberd.compile.residency.sizes import size
from emberd.compile.residency.trace import Trace, TraceHeader
from emberd.daemon.activation_map import ActivationMap
from emberd.daemon.errors import EmberdError
from emberd.daemon.policies import POLICIES, Policy
from emberd.daemon.sizes import is_bare, read_size

Commands = Sequence[tuple[str, Sequence[Step]]]
"""(class, steps) each."""

_BUDGETS = ("12.5%", "25%", "50%")
_PLOTTED = (5, 10, 15, 20, 25, 30, 40, 50, 60, 70, 80, 90, 100)  # per cent of the bank
_CHUNK = 512
_KINDS = {"tokens": "tokens that come", "next layer": "a token's next layer"}
_BEST = (("lstm", "token-transitions"), ("next-router", "layer-transitions"))


@dataclass(frozen=True)
class Row:
    """What a policy does with a budget; its predictor, if it needs one, is named in brackets.
    `read_bytes`: per token, those before it is asked for
    included."""

    policy: str
    budget: str
    slots: int
    hit_rate: float
    read_bytes: float


def simulate(
    header: TraceHeader,
    commands: Commands,
    policies: Iterable[Policy],
    budgets: Iterable[str],
    activation_map: ActivationMap | None,
    cold: bool,
    predicted: Mapping[str, Mapping[str, Commands]],
) -> list[Row]:
    """Every policy with every budget, those that need a predictor with each of its kind: the
    commands with its expectations, by kind (as in Policy.needs_predictor) and name. Raises
    EmberdError for a budget that is none."""
    rows = []
    slots = {budget: read_budget(budget, header) for budget in budgets}
    for policy in policies:
        runs = {policy.name: commands}
        if policy.needs_predictor:
            of_kind = predicted.get(policy.needs_predictor, {})
            runs = {f"{policy.name} ({name})": found for name, found in of_kind.items()}
        for name, run in runs.items():
            for budget, count in slots.items():
                outcome = replay(run, policy, count, activation_map, cold)
                read = outcome.reads_per_token * header.expert_bytes
                rows.append(Row(name, budget, count, outcome.hit_rate, read))
    return rows


def read_budget(text: str, header: TraceHeader) -> int:
    """Slots of a budget: a size, or a share of the bank such as 25%; at most the bank.

    Raises EmberdError for what is neither, or too small for the experts of one layer.
    """
    bank = header.layers * header.experts
    if text.endswith("%"):
        try:
            share = float(text[:-1])
            slots = int(bank * share / 100)
        except (ValueError, OverflowError):
            share = -1
        if share < 0:
            raise EmberdError(f"--budget {text}: not a share such as 25%")
    else:
        count = read_size(text)
        if count < header.expert_bytes and is_bare(text):
            raise EmberdError(f"--budget {text}: {count} bytes; did you mean {text}% or {text}G?")
        slots = count // header.expert_bytes
    if slots < header.top_k:
        raise EmberdError(
            f"--budget {text}: {max(slots, 0)} experts of {size(header.expert_bytes)}, but a token "
            f"needs {header.top_k} of a layer at once"
        )
    return min(slots, bank)


def table(rows: Sequence[Row], header: TraceHeader) -> str:
    """Hit rate and bytes read per token: a line a policy, a column a budget."""
    demand = header.layers * header.top_k
    budgets = {row.budget: row.slots for row in rows}
    width = max(len(row.policy) for row in rows)
    heads = [f"{budget} ({slots} slots)" for budget, slots in budgets.items()]
    columns = [max(len(head), 18) for head in heads]
    lines = [
        f"{header.layers} layers of {header.experts} experts, {size(header.expert_bytes)} each; "
        f"token_demand {demand} experts, {size(demand * header.expert_bytes)}",
        "",
        "  ".join([f"{'policy':<{width}}", *map(str.rjust, heads, columns)]),
    ]
    for policy in dict.fromkeys(row.policy for row in rows):
        cells = [
            f"{row.hit_rate:6.1%} {size(row.read_bytes) + '/tok':>11}"
            for row in rows
            if row.policy == policy
        ]
        lines.append("  ".join([f"{policy:<{width}}", *map(str.rjust, cells, columns)]))
    for budget, slots in budgets.items():
        if slots < demand:
            lines.append(
                f"note: {budget} is less than token_demand: nothing that a token used is there "
                "for the next"
            )
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", type=Path, help="file written by emberc profile --trace")
    parser.add_argument(
        "--budget",
        action="append",
        metavar="SIZE",
        help="25%% of the bank, or 6G; may be repeated (default 12.5%%, 25%% and 50%%)",
    )
    parser.add_argument(
        "--policy",
        action="append",
        choices=POLICIES,
        metavar="NAME",
        help=f"may be repeated (default: all that can be): {', '.join(POLICIES)}",
    )
    parser.add_argument("--map", type=Path, help="activation map, for the policies that need one")
    parser.add_argument(
        "--predictor",
        action="append",
        metavar="NAME",
        help="for the policies that need one; may be repeated (default: lstm with --lstm, else "
        "token-transitions with --map; of next layers next-router if the trace has it, else "
        "layer-transitions; emberc predict compares them)",
    )
    parser.add_argument(
        "--lstm", type=Path, metavar="FILE.onnx", help="network that emberc profile --train wrote"
    )
    parser.add_argument(
        "--cold", action="store_true", help="begin every command with an empty cache"
    )
    parser.add_argument("--first", type=int, metavar="N", help="only a command's first N tokens")
    parser.add_argument(
        "--chunk",
        type=int,
        default=_CHUNK,
        metavar="N",
        help="tokens of a prompt that are read together (default %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="hit rate over budget")


def run(arguments: argparse.Namespace) -> None:
    for name in ("chunk", "first"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise EmberdError(f"--{name} {value}: expected 1 or more")
    trace = Trace(arguments.trace)
    found = None if arguments.map is None else ActivationMap.read(arguments.map)
    if found is not None:
        found.check_model(trace.header.model)
    there = available(trace.header, found, arguments.lstm)
    answered = any(len(command.ids) > command.prompt for command in trace)
    if not answered:  # what is expected of next layers counts in answers alone
        there = {
            name: predictor for name, predictor in there.items() if 0 not in predictor.horizons
        }
    predictors = _predictors(arguments.predictor, there)
    policies = _policies(arguments.policy, found, {kind for kind, of in predictors.items() if of})

    def cut(predictor: Predictor | None = None) -> Commands:
        return [
            (
                command.command_class,
                list(steps(command, arguments.chunk, arguments.first, predictor)),
            )
            for command in trace
        ]

    commands = cut()
    if not commands:
        raise EmberdError(f"{arguments.trace}: no commands")
    given = arguments.budget or _BUDGETS
    predicted = {
        kind: {predictor.name: cut(predictor) for predictor in of_kind}
        for kind, of_kind in predictors.items()
    }
    rows = simulate(trace.header, commands, policies, given, found, arguments.cold, predicted)
    if not answered:
        _say_no_answers(arguments.trace, arguments.chunk)
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        print(table(rows, trace.header))
    if arguments.plot is not None:
        budgets = [
            f"{share}%"
            for share in _PLOTTED
            if share * trace.header.layers * trace.header.experts >= 100 * trace.header.top_k
        ]
        drawn = simulate(
            trace.header, commands, policies, budgets, found, arguments.cold, predicted
        )
        svg = _plot(drawn, arguments.trace.name)
        write_whole(arguments.plot, lambda file: file.write(svg.encode()))


def _say_no_answers(trace: Path, chunk: int) -> None:
    ways = "record commands without their answers"
    if chunk > 1:
        ways += ", or give --chunk 1 to have prompts read token by token"
    print(
        f"emberc: note: {trace} has no answers, only prompts: nothing is decoded, and predictors "
        f"of next layers are left out, as they say nothing of them; {ways}",
        file=sys.stderr,
    )


def _policies(
    names: Sequence[str] | None, found: ActivationMap | None, kinds: Collection[str]
) -> list[Policy]:
    """Those asked for, or all that can be: `kinds` of predictors are there."""

    def missing(policy: Policy) -> str:
        if policy.needs_map and found is None:
            return "an activation map, give --map"
        kind = policy.needs_predictor
        return (
            f"a predictor of {_KINDS[kind]}, give --predictor" if kind and kind not in kinds else ""
        )

    if names is None:
        return [policy for policy in POLICIES.values() if not missing(policy)]
    chosen = [POLICIES[name] for name in dict.fromkeys(names)]
    for policy in chosen:
        if lacking := missing(policy):
            raise EmberdError(f"--policy {policy.name}: needs {lacking}")
    return chosen


def _predictors(
    names: Sequence[str] | None, there: Mapping[str, Predictor]
) -> dict[str, list[Predictor]]:
    """Those chosen, by kind: by default the best of each kind that is there."""
    if names is None:
        best = (next((name for name in order if name in there), None) for order in _BEST)
        names = [name for name in best if name is not None]
    for name in names:
        if name not in there:
            raise EmberdError(
                f"--predictor {name}: expected one of {', '.join(there)}; others need --map, "
                "--lstm or what routers expected of answers in the trace"
            )
    found: dict[str, list[Predictor]] = {kind: [] for kind in _KINDS}
    for name in dict.fromkeys(names):
        kind = "next layer" if 0 in there[name].horizons else "tokens"
        found[kind].append(there[name])
    return found


def _plot(rows: Sequence[Row], name: str) -> str:
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        share = float(row.budget.rstrip("%")) / 100
        lines.setdefault(row.policy, []).append((share, row.hit_rate))
    return curves(f"Hit rate, {name}", "budget, share of all experts", "hit rate", lines)
