"""Counters and histograms in Prometheus' text format (version 0.0.4)."""

from __future__ import annotations

import bisect
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

OUTCOMES = ("completed", "cancelled", "failed", "refused")
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class ExpertCounts(Protocol):
    """What the experts of a layer have cost; see `Model.expert_counters`."""

    @property
    def hits(self) -> int: ...

    @property
    def misses(self) -> int: ...

    @property
    def bytes(self) -> int: ...

    @property
    def stall_nanoseconds(self) -> int: ...

    @property
    def skipped(self) -> int: ...

    @property
    def substituted(self) -> int: ...

    @property
    def expected(self) -> int: ...

    @property
    def expected_used(self) -> int: ...


class Histogram:
    """Observations in seconds."""

    def __init__(self) -> None:
        self._counts = [0] * (len(SECONDS) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect.bisect_left(SECONDS, seconds)] += 1
        self._sum += seconds

    def lines(self, name: str) -> list[str]:
        counts = list(self._counts)
        running, lines = 0, []
        for bound, count in zip((*map(str, SECONDS), "+Inf"), counts, strict=True):
            running += count
            lines.append(f'{name}_bucket{{le="{bound}"}} {running}')
        return [*lines, f"{name}_sum {self._sum:.6f}", f"{name}_count {running}"]


class Metrics:
    """What /metrics reports; the engine and the server write to it.

    Attributes:
        responses: by HTTP status.
        requests: by outcome: completed, cancelled (the client left), failed (the model did) or
            refused (no room in the context or the queue).
        milestones: of the start, in seconds after the process was started; see `reached`.
    """

    def __init__(self) -> None:
        self.responses: Counter[int] = Counter()
        self.requests: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generated_tokens = 0
        self.prefill_seconds = 0.0
        self.decode_seconds = 0.0
        self.wakes = 0
        self.wake_seconds = 0.0
        self.milestones: dict[str, float] = {}
        self.time_to_first_token = Histogram()
        self.time_per_token = Histogram()

    def reached(self, milestone: str) -> None:
        """Notes when this was first done."""
        if milestone not in self.milestones:
            self.milestones[milestone] = process_age()

    def text(
        self,
        gauges: Mapping[str, tuple[str, float]],
        experts: Sequence[ExpertCounts] = (),
        classes: Sequence[tuple[str | None, ExpertCounts]] = (),
    ) -> str:
        """The exposition; ``gauges``: name -> help, value; ``experts``: what each layer's cost;
        ``classes``: what those of each class of commands cost, of no class (an empty label). Layers
        of classes would be thousands of series for every scrape: /v1/experts has them."""
        lines = []
        for name, text, counts in (
            ("emberd_http_responses_total", "Responses by status code.", self._codes()),
            ("emberd_requests_total", "Generation requests by outcome.", self._outcomes()),
        ):
            lines += _header(name, text, "counter")
            lines += [f"{name}{{{label}}} {count}" for label, count in counts]
        for name, text, value in (
            ("prompt_tokens", "Prompt tokens, those from the cache included.", self.prompt_tokens),
            ("cached_tokens", "Prompt tokens that needed no prefill.", self.cached_tokens),
            ("generated_tokens", "Tokens sampled.", self.generated_tokens),
            ("prefill_seconds", "Time spent reading prompts.", self.prefill_seconds),
            ("decode_seconds", "Time spent generating tokens.", self.decode_seconds),
            ("wakes", "Times that an unloaded model was opened again.", self.wakes),
            ("wake_seconds", "Time spent opening it.", self.wake_seconds),
        ):
            lines += _header(f"emberd_{name}_total", text, "counter")
            lines.append(f"emberd_{name}_total {value}")
        for name, text, histogram in (
            ("time_to_first_token", "From request to first token.", self.time_to_first_token),
            ("time_per_token", "Between the tokens of an answer.", self.time_per_token),
        ):
            lines += _header(f"emberd_{name}_seconds", text, "histogram")
            lines += histogram.lines(f"emberd_{name}_seconds")
        layers = [(f'layer="{layer}"', counts) for layer, counts in enumerate(experts)]
        lines += _expert_lines("emberd_expert", layers)
        named = [(f'class="{_escaped(name or "")}"', counts) for name, counts in classes]
        lines += _expert_lines("emberd_expert_class", named)
        lines += _header("emberd_start_seconds", "When, after its start, it first did.", "gauge")
        lines += [
            f'emberd_start_seconds{{milestone="{name}"}} {seconds:.4f}'
            for name, seconds in list(self.milestones.items())
        ]
        for name, (text, number) in gauges.items():
            lines += [*_header(name, text, "gauge"), f"{name} {number}"]
        return "\n".join(lines) + "\n"

    def _codes(self) -> list[tuple[str, int]]:
        return [(f'code="{code}"', count) for code, count in sorted(self.responses.items())]

    def _outcomes(self) -> list[tuple[str, int]]:
        return [(f'outcome="{outcome}"', count) for outcome, count in self.requests.items()]


def _expert_lines(prefix: str, counted: Sequence[tuple[str, ExpertCounts]]) -> list[str]:
    """``counted``: label, counts."""
    lines = []
    labels, counters = [label for label, _ in counted], [counts for _, counts in counted]
    for name, text, values in (
        ("hits", "Experts that a step found in memory.", [c.hits for c in counters]),
        ("misses", "Experts that a step did not find there.", [c.misses for c in counters]),
        ("skipped", "Missing experts that a step went on without.", [c.skipped for c in counters]),
        (
            "substituted",
            "Experts that tokens took in place of missing ones.",
            [c.substituted for c in counters],
        ),
        (
            "layer_ahead",
            "Experts that were read as the layer before expected them.",
            [c.expected for c in counters],
        ),
        (
            "layer_ahead_used",
            "Experts of those that a step then asked for.",
            [c.expected_used for c in counters],
        ),
        ("read_bytes", "Bytes of experts that were read.", [c.bytes for c in counters]),
        (
            "stall_seconds",
            "Time that steps waited for experts.",
            [c.stall_nanoseconds / 1e9 for c in counters],
        ),
    ):
        lines += _header(f"{prefix}_{name}_total", text, "counter")
        lines += [
            f"{prefix}_{name}_total{{{label}}} {value}"
            for label, value in zip(labels, values, strict=True)
        ]
    return lines


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"")


def _header(name: str, text: str, kind: str) -> list[str]:
    return [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]


def process_age() -> float:
    """Seconds since this process was started, which the kernel notes to a tick (10 ms)."""
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # field 22 of proc_pid_stat(5)
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


def resident_bytes() -> int:
    """This process's resident memory."""
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    kibibytes = next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS"))
    return int(kibibytes) * 1024


def open_files() -> int:
    """How many file descriptors this process has open."""
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 (no Path per descriptor)
