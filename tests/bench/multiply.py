"""How near the multiplications of a prompt come to what the processor can do at most.

Each kernel that multiplies matrices of bytes is timed as the model runs it, with all that it does
besides (quantising its input, unpacking weights, their scales, activations between two matrices),
beside the peak of the instruction that multiplies bytes, measured in turns.

    python -m bench.multiply ARTIFACT --threads 2
"""

from __future__ import annotations

import argparse
import math
import random
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from emberd.daemon.artifact import Artifact
from emberd.daemon.core import Model
from emberd.daemon.profile import KernelCost, Profile

from bench.peak import VnniPeak
from bench.table import Row, row

PROMPT, ROUNDS = 512, 7
_PLANES = {"a8": 1, "a16": 2}  # of bytes, that activations are multiplied in
_EXPERTS = re.compile(
    r"(expert_outputs|shared_expert)_q\d(a8|a16)_h(\d+)_[is](\d+)(?:_e\d+_k(\d+)|_tn)$"
)
_LINEAR = re.compile(r"(linear|projections)_.*_k(\d+)_tn$")
_ROWS = re.compile(r"_q\d(a8|a16)_n(\d+)")


@dataclass(frozen=True)
class Multiplication:
    """What a kernel multiplies; a product of two bytes and its addition are two operations."""

    name: str
    operations: int  # for a token


def multiplication(symbol: str) -> Multiplication | None:
    """As the name of a kernel tells; None for what multiplies no matrices of bytes."""
    if found := _EXPERTS.match(symbol):
        kind, precision, hidden, width, top_k = found.groups()
        name = "experts" if kind == "expert_outputs" else "shared expert"
        size = 3 * int(hidden) * int(width)
        operations = 2 * _PLANES[precision] * size * int(top_k or 1)
        return Multiplication(f"{name} {hidden} x {width}", operations)
    if found := _LINEAR.match(symbol):
        kind, columns = found.groups()
        parts = [(_PLANES[precision], int(rows)) for precision, rows in _ROWS.findall(symbol)]
        operations = sum(2 * planes * rows * int(columns) for planes, rows in parts)
        rows = sum(rows for _planes, rows in parts)
        return Multiplication(f"{kind} {rows} x {columns}", operations) if parts else None
    return None


def measure(artifact: Artifact, threads: int, rounds: int = ROUNDS) -> list[Row]:
    """A row for each multiplication of a prompt of 512 tokens (of one chunk, where chunks are
    shorter), the one with the most operations first; in the place of the peer, the peak."""
    peak = VnniPeak()
    rates: defaultdict[str, list[float]] = defaultdict(list)
    sizes: dict[str, float] = {}
    peaks = []
    with Model(artifact, threads) as model:
        tokens = min(PROMPT, max(artifact.program.chunk_sizes))
        draw = random.Random(0)
        with model.open_session(tokens) as session:
            for number in range(rounds + 1):
                peaks.append(peak.measure(threads))
                session.reset()
                prompt = draw.choices(range(model.vocab_size), k=tokens)
                with Profile(model) as profile:
                    session.prefill(prompt)
                if number:  # the first one reads weights and touches memory
                    for name, size, rate in _rates(profile.costs(), tokens):
                        rates[name].append(rate)
                        sizes[name] = size
    return [
        row(
            f"prefill {tokens}: {name} beside VNNI peak",
            threads,
            "Gop/s",
            "higher",
            {"emberd": [rate / 1e9 for rate in rates[name]], "peer": [p / 1e9 for p in peaks]},
        )
        for name in sorted(rates, key=sizes.__getitem__, reverse=True)
    ]


def _rates(costs: Sequence[KernelCost], tokens: int) -> Iterator[tuple[str, float, float]]:
    """Name, operations and operations per second of what was multiplied for all tokens."""
    totals: Mapping[str, list[tuple[float, float]]] = defaultdict(list)
    for cost in costs:
        if found := multiplication(cost.symbol):
            operations = found.operations * tokens * cost.calls
            totals[found.name].append((operations, cost.seconds))
    for name, parts in totals.items():
        operations, seconds = map(math.fsum, zip(*parts, strict=True))
        yield name, operations, operations / seconds


def table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table: median (best)."""
    lines = [
        "| multiplication | threads | Gop/s | peak | share | must |",
        "|---|---|---|---|---|---|",
    ]
    for found in rows:
        failed = " ✗" if found.holds is False else ""
        must = f"≥ {found.must:.0%}" if found.must else ""
        lines.append(
            f"| {found.figure} | {found.threads} | {found.emberd:.0f} ({found.emberd_best:.0f}) "
            f"| {found.peer:.0f} ({found.peer_best:.0f}) | {found.ratio:.1%}{failed} | {must} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.multiply", description=__doc__.splitlines()[0])
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    print(table(measure(Artifact.open(arguments.artifact), arguments.threads)))


if __name__ == "__main__":
    main()
