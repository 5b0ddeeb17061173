"""The figures of a run as rows: what was measured, the ratio, and what it must be."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median


@dataclass(frozen=True)
class Target:
    """Bounds of emberd / llama.cpp (or what a figure has in its place), from the project's table
    of what it must show; `within`: how far emberd may be on the wrong side of its peer instead, in
    the unit of the figure."""

    must: float | None = None
    aim: float | None = None
    within: float | None = None


TARGETS: dict[tuple[str, int | None], Target] = {
    ("decode, context 0", 1): Target(1.3, 1.5),
    ("decode, context 0", 2): Target(1.25, 1.5),
    ("decode, context 0: moved beside memory read", 1): Target(0.85),
    ("decode, context 0: moved beside memory read", 2): Target(0.80),
    ("token: outside kernels beside all of it", None): Target(0.03),
    ("decode, context 8192", None): Target(1.3, 1.6),
    ("prefill 128", None): Target(2.5, 3.5),
    ("prefill 512", None): Target(2.5, 3.5),
    ("prefill 512: experts 2048 x 512 beside VNNI peak", None): Target(0.7),
    ("prefill 512: projections 12288 x 2048 beside VNNI peak", None): Target(0.7),
    ("prefill 512: projections 9216 x 2048 beside VNNI peak", None): Target(0.7),
    ("prefill 512: linear 2048 x 4096 beside VNNI peak", None): Target(0.7),
    ("decode, 4 streams", None): Target(1.5, 2.5),
    ("peak memory", None): Target(0.6, 0.5),
    ("load to first token", None): Target(0.15, 0.08),
    ("fifth, 50 % of experts, decode", None): Target(4),
    ("fifth, 25 % of experts, decode", None): Target(6),
    ("fifth, 25 % of experts, prefill 512", None): Target(5),
    ("skewed, 50 % of experts, decode", None): Target(4),
    ("skewed, 25 % of experts, decode", None): Target(6),
    ("skewed, 25 % of experts, prefill 512", None): Target(5),
    ("fifth, 50 % of experts, hit rate", None): Target(within=15),
    ("fifth, 25 % of experts, hit rate", None): Target(within=15),
    ("skewed, 50 % of experts, hit rate", None): Target(within=15),
    ("skewed, 25 % of experts, hit rate", None): Target(within=15),
    ("skewed, 50 % of experts, first 50 tokens, map / plain LRU", None): Target(0.75),
    ("skewed, 25 % of experts, first 50 tokens, map / plain LRU", None): Target(0.75),
}
"""By figure and number of threads; None: whatever the number."""


@dataclass(frozen=True)
class Row:
    """One figure: medians of both sides and their ratio, and the best values seen.

    `better` is "higher" or "lower"; `must` and `aim` bound the ratio, `within` the difference; None
    where nothing is asked.
    """

    figure: str
    threads: int
    unit: str
    better: str
    emberd: float
    peer: float
    ratio: float
    must: float | None
    aim: float | None
    emberd_best: float
    peer_best: float
    samples: int
    within: float | None = None

    @property
    def holds(self) -> bool | None:
        """Whether the ratio is as it must be; None where nothing is asked."""
        if self.within is not None:
            worse = self.peer - self.emberd if self.better == "higher" else self.emberd - self.peer
            return worse <= self.within
        if self.must is None:
            return None
        return self.ratio >= self.must if self.better == "higher" else self.ratio <= self.must


def row(
    figure: str, threads: int, unit: str, better: str, values: Mapping[str, Sequence[float]]
) -> Row:
    """The row of a figure, from the values of each side (worker.SIDES)."""
    emberd, peer = values["emberd"], values["peer"]
    target = TARGETS.get((figure, threads)) or TARGETS.get((figure, None))
    best = max if better == "higher" else min
    return Row(
        figure=figure,
        threads=threads,
        unit=unit,
        better=better,
        emberd=median(emberd),
        peer=median(peer),
        ratio=median(emberd) / median(peer),
        must=target.must if target else None,
        aim=target.aim if target else None,
        emberd_best=best(emberd),
        peer_best=best(peer),
        samples=min(len(emberd), len(peer)),
        within=target.within if target else None,
    )


def write_json(rows: Sequence[Row], path: Path) -> None:
    """A JSON list with an object per row."""
    path.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")


def markdown(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table: median (best)."""
    lines = [
        "| figure | threads | unit | emberd | llama.cpp | ratio | must | aim |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        sign = "≥" if row.better == "higher" else "≤"
        bounds = [f"{sign} {bound:g}" if bound else "" for bound in (row.must, row.aim)]
        if row.within is not None:
            bounds[0] = f"within {row.within:g}"
        lines.append(
            f"| {row.figure} | {row.threads} | {row.unit} "
            f"| {_number(row.emberd)} ({_number(row.emberd_best)}) "
            f"| {_number(row.peer)} ({_number(row.peer_best)}) "
            f"| {row.ratio:.{2 if row.ratio >= 0.1 else 3}f}{' ✗' if row.holds is False else ''} "
            f"| {bounds[0]} | {bounds[1]} |"
        )
    return "\n".join(lines)


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"
