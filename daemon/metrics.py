"""Counters and histograms in Prometheus' text format (version 0.0.4)."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable
from pathlib import Path

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


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
    """What /metrics reports; the engine and the server write to it."""

    def __init__(self) -> None:
        self.responses: Counter[int] = Counter()
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generated_tokens = 0
        self.time_to_first_token = Histogram()
        self.time_per_token = Histogram()

    def text(self, gauges: dict[str, tuple[str, Callable[[], float]]]) -> str:
        """The exposition; ``gauges``: name -> help, value now."""
        lines = ["# HELP emberd_http_responses_total Responses by status code."]
        lines.append("# TYPE emberd_http_responses_total counter")
        for code, count in sorted(self.responses.items()):
            lines.append(f'emberd_http_responses_total{{code="{code}"}} {count}')
        counters = {
            "prompt": (self.prompt_tokens, "Prompt tokens, those from the cache included."),
            "cached": (self.cached_tokens, "Prompt tokens that needed no prefill."),
            "generated": (self.generated_tokens, "Tokens sampled."),
        }
        for name, (value, text) in counters.items():
            lines += _header(f"emberd_{name}_tokens_total", text, "counter")
            lines.append(f"emberd_{name}_tokens_total {value}")
        histograms = {
            "time_to_first_token": (self.time_to_first_token, "From request to first token."),
            "time_per_token": (self.time_per_token, "Between the tokens of an answer."),
        }
        for name, (histogram, text) in histograms.items():
            lines += _header(f"emberd_{name}_seconds", text, "histogram")
            lines += histogram.lines(f"emberd_{name}_seconds")
        for name, (text, read) in gauges.items():
            lines += [*_header(name, text, "gauge"), f"{name} {read()}"]
        return "\n".join(lines) + "\n"


def _header(name: str, text: str, kind: str) -> list[str]:
    return [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]


def resident_bytes() -> int:
    """This process's resident memory."""
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    kibibytes = next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS"))
    return int(kibibytes) * 1024
