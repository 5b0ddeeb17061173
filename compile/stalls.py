"""`emberc stalls`: what tokens wait for experts with a budget, and what waiting less costs.

Two settings of the daemon shorten waits and change answers: routing_margin and stall_deadline. The
same tokens are decoded without them, which gives the logits of the whole model, and with each.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, product
from pathlib import Path

import numpy as np
from emberd.compile.residency.commands import CommandReader
from emberd.compile.residency.sizes import size
from emberd.compile.residency.trace import TraceHeader
from emberd.compile.simulate import read_budget
from emberd.compile.verify import Comparison, compare
from emberd.daemon.artifact import Artifact
from emberd.daemon.bindings import ExpertCounters
from emberd.daemon.config import RANGES
from emberd.daemon.core import Model
from emberd.daemon.errors import EmberdError
from emberd.daemon.session import Session
from emberd.daemon.shortcuts import Shortcuts
from numpy.typing import NDArray

_BUDGET = "25%"
_MARGINS = ("0.01", "0.05", "0.2")
_WEIGHT = "0.05"
_COMMANDS, _MAX_TOKENS = 8, 32
_PROMPT = 32  # random tokens, where no commands are given


@dataclass
class Text:
    """Tokens that are read in one go, and those that are then decoded one after the other; none as
    long as the model has not said how it goes on."""

    prompt: list[int]
    decoded: list[int]


@dataclass
class Run:
    """What decoding cost with a setting: `cost` of all tokens, `stalls` of each in seconds, and
    the logits f32 [vocabulary] after each."""

    cost: ExpertCounters = field(default_factory=ExpertCounters)
    stalls: list[float] = field(default_factory=list)
    logits: list[NDArray[np.float32]] = field(default_factory=list)

    @property
    def hit_rate(self) -> float:
        hits, misses = int(self.cost.hits), int(self.cost.misses)
        return hits / max(hits + misses, 1)

    def per_token(self, name: str) -> float:
        """One of the counters."""
        count: int = getattr(self.cost, name)
        return count / len(self.stalls)


@dataclass(frozen=True)
class Row:
    """Shortcuts, a run with them, and its logits against those of the whole model."""

    shortcuts: Shortcuts
    run: Run
    comparison: Comparison


def measure(
    artifact: Artifact,
    budget: int,
    texts: Sequence[Text],
    settings: Sequence[Shortcuts],
    max_tokens: int = _MAX_TOKENS,
    threads: int | None = None,
) -> list[Row]:
    """Decodes the texts without shortcuts, which says how those go on that are not complete, and
    with each of the settings. Every run has `budget` bytes of experts, none of them in memory at
    first, where the least recently used make place."""
    exact = _run(artifact, budget, texts, Shortcuts(), max_tokens, threads)
    if not exact.stalls:
        raise EmberdError("the model ends every answer at once: there is nothing to decode")
    expected = np.stack(exact.logits)
    rows = [Row(Shortcuts(), exact, compare(expected, expected))]
    for shortcuts in settings:
        run = _run(artifact, budget, texts, shortcuts, max_tokens, threads)
        rows.append(Row(shortcuts, run, compare(np.stack(run.logits), expected)))
        run.logits.clear()
    return rows


def _run(
    artifact: Artifact,
    budget: int,
    texts: Sequence[Text],
    shortcuts: Shortcuts,
    max_tokens: int,
    threads: int | None,
) -> Run:
    run, stop_tokens = Run(), frozenset(artifact.model.stop_tokens)
    with Model(artifact, threads, budget) as model:
        shortcuts.apply(model)
        for text in texts:
            with model.open_session(len(text.prompt) + max_tokens) as session:
                logits = session.prefill(text.prompt)
                for token in text.decoded:
                    _decode(model, session, token, run)
                if text.decoded or logits is None:
                    continue
                following = logits.top(1)[0][0]
                while following not in stop_tokens and len(text.decoded) < max_tokens:
                    text.decoded.append(following)
                    following = _decode(model, session, following, run)
    return run


def _decode(model: Model, session: Session, token: int, run: Run) -> int:
    """Adds what the token cost to the run; returns the likeliest one after it."""
    before = _total(model)
    logits = model.step_batch([session], [token])
    cost = _total(model)
    for name, *_ in ExpertCounters._fields_:
        difference = getattr(cost, name) - getattr(before, name)
        setattr(run.cost, name, getattr(run.cost, name) + difference)
    run.stalls.append((cost.stall_nanoseconds - before.stall_nanoseconds) / 1e9)
    run.logits.append(np.array(logits.memory(), np.float32)[-1])
    return logits.top(1)[0][0]


def _total(model: Model) -> ExpertCounters:
    total = ExpertCounters()
    for counters in model.expert_counters():
        for name, *_ in ExpertCounters._fields_:
            setattr(total, name, getattr(total, name) + getattr(counters, name))
    return total


def table(rows: Sequence[Row]) -> str:
    """A line a setting; reads and experts are of a token."""
    lines = [
        "routing_margin  stall_deadline    hits    read/tok  stall p50     p99  replaced  skipped"
        "   KL mean      max   top-1"
    ]
    for row in rows:
        shortcuts, run, found = row.shortcuts, row.run, row.comparison
        median, late = np.percentile(run.stalls, [50, 99]) * 1000
        deadline = f"{shortcuts.stall_deadline * 1000:g} ms" if shortcuts.stall_deadline else "-"
        lines.append(
            f"{shortcuts.routing_margin or '-':>14}  {deadline:>14}  {run.hit_rate:6.1%}  "
            f"{size(run.per_token('bytes')):>10}  {median:6.1f} ms  {late:5.1f}  "
            f"{run.per_token('substituted'):8.2f}  {run.per_token('skipped'):7.2f}  "
            f"{found.mean_kl:8.2g}  {found.max_kl:7.2g}  {found.top1_agreement:6.1%}"
        )
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("artifact", type=Path, help="folder written by emberc build")
    parser.add_argument(
        "--budget",
        default=_BUDGET,
        metavar="SIZE",
        help="of memory for experts: 25%% of them (the default), or 6G",
    )
    parser.add_argument(
        "--routing-margin",
        action="append",
        metavar="X",
        help="the daemon's routing_margin; may be repeated (default 0.01, 0.05 and 0.2, unless a "
        "--stall-deadline is given)",
    )
    parser.add_argument(
        "--stall-deadline",
        action="append",
        metavar="MS",
        help="the daemon's stall_deadline; may be repeated, and goes with every margin",
    )
    parser.add_argument(
        "--stall-weight",
        default=_WEIGHT,
        metavar="X",
        help="the daemon's stall_weight (default %(default)s)",
    )
    parser.add_argument(
        "--commands",
        type=Path,
        metavar="FILE",
        help="JSON lines as for emberc profile, of which answers are decoded (default: random "
        "tokens)",
    )
    parser.add_argument(
        "--first",
        type=int,
        default=_COMMANDS,
        metavar="N",
        help="only the first N commands (default %(default)s)",
    )
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=_MAX_TOKENS,
        metavar="N",
        help="tokens decoded of each (default %(default)s)",
    )
    parser.add_argument("--threads", type=int, help="default: one per physical core")


def run(arguments: argparse.Namespace) -> None:
    for name in ("first", "max_tokens"):
        if getattr(arguments, name) < 1:
            option = name.replace("_", "-")
            raise EmberdError(f"--{option} {getattr(arguments, name)}: expected 1 or more")
    settings = _settings(arguments)
    artifact = Artifact.open(arguments.artifact)
    with Model(artifact, 1) as model:
        experts, longest = model.experts, model.max_context - arguments.max_tokens
        for shortcuts in settings:  # which may be none of this model
            shortcuts.apply(model)
    if longest < 1:
        raise EmberdError(
            f"--max-tokens {arguments.max_tokens}: expected less than the context of "
            f"{longest + arguments.max_tokens}"
        )
    header = TraceHeader("", experts.layers, experts.experts, experts.top_k, experts.expert_bytes)
    slots, bank = read_budget(arguments.budget, header), experts.layers * experts.experts
    if slots == bank:
        raise EmberdError(
            f"--budget {arguments.budget}: all {bank} experts are in memory then, and no token "
            f"waits; expected less than {size(bank * experts.expert_bytes)}"
        )
    texts = list(_texts(artifact, arguments, longest))
    if not texts:
        raise EmberdError(f"{arguments.commands}: no commands")
    budget = slots * experts.expert_bytes
    rows = measure(artifact, budget, texts, settings, arguments.max_tokens, arguments.threads)
    print(
        f"{slots} of {bank} experts in memory at most, "
        f"{len(rows[0].run.stalls)} tokens decoded in {len(texts)} texts; per token:\n{table(rows)}"
    )


def _settings(arguments: argparse.Namespace) -> list[Shortcuts]:
    """Raises EmberdError."""
    deadlines = [_number("stall_deadline", text) for text in arguments.stall_deadline or ()]
    texts = arguments.routing_margin or (() if deadlines else _MARGINS)
    margins = [_number("routing_margin", text) for text in texts]
    weight = _number("stall_weight", arguments.stall_weight)
    return [
        Shortcuts(margin, deadline / 1000, weight)
        for margin, deadline in product((0.0, *margins), (0.0, *deadlines))
        if margin or deadline
    ]


def _number(setting: str, text: str) -> float:
    """The value of a setting of the daemon, in its bounds, given as the option of that name; 0 only
    where it does not turn a shortcut off. Raises EmberdError."""
    low, high = RANGES[setting]
    switches, unit = setting != "stall_weight", " ms" if setting == "stall_deadline" else ""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if low <= value <= high and (value or not switches):
        return value
    expected = f"{low:g} to {high:g}{unit}"
    if switches:
        expected = f"more than 0, at most {high:g}{unit} (without it is measured anyway)"
    raise EmberdError(f"--{setting.replace('_', '-')} {text}: expected {expected}")


def _texts(artifact: Artifact, arguments: argparse.Namespace, longest: int) -> Iterator[Text]:
    """Of a complete command, its last tokens are decoded."""
    if arguments.commands is None:
        draw = random.Random(0)
        for _ in range(arguments.first):
            count = min(_PROMPT, longest) + arguments.max_tokens
            tokens = draw.choices(range(artifact.model.vocab_size), k=count)
            yield Text(tokens[: -arguments.max_tokens], tokens[-arguments.max_tokens :])
        return
    commands = CommandReader(artifact, longest).read(arguments.commands)
    for command in islice(commands, arguments.first):
        tokens = list(command.tokens)
        cut = max(1, len(tokens) - arguments.max_tokens) if command.complete else len(tokens)
        yield Text(tokens[:cut], tokens[cut:])
