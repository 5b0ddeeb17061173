"""What a token costs outside kernels in the engine, as the daemon runs it.

Answers are streamed to an event loop in the same process, one after the other. What is not spent in
kernels is all the rest of a token: sampling, text, hand-over to the loop, scheduling and the calls
of the core. It must be less than 3 % of a token of the measured checkpoint.

    python -m bench.outside ARTIFACT --threads 2
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import median

from emberd.daemon.artifact import Artifact
from emberd.daemon.core import Model
from emberd.daemon.engine import Engine
from emberd.daemon.generation import Request
from emberd.daemon.profile import Profile
from emberd.daemon.prompt import load_tokenizer
from emberd.daemon.sampling import SamplingParameters

PROMPT, TOKENS, ROUNDS = 16, 48, 7
MUST = 3.0  # % of a token, at most
SAMPLINGS: Mapping[str, SamplingParameters] = {
    "greedy": SamplingParameters(temperature=0),
    "temperature 0.7, top-k 20, top-p 0.95": SamplingParameters(0.7, 20, 0.95, seed=1),
    "temperature 1": SamplingParameters(seed=1),
}


@dataclass(frozen=True)
class Token:
    """Seconds of a token, and those of them outside kernels."""

    seconds: float
    outside: float

    @property
    def share(self) -> float:
        """Percent outside kernels."""
        return 100 * self.outside / self.seconds


def measure(
    artifact: Artifact,
    threads: int,
    samplings: Mapping[str, SamplingParameters] = SAMPLINGS,
    tokens: int = TOKENS,
    rounds: int = ROUNDS,
) -> dict[str, list[Token]]:
    """The mean token of each of `rounds` answers by the way of sampling: what `tokens` tokens take
    besides the prompt and the first one."""
    model = Model(artifact, threads)
    engine = Engine(lambda: model, load_tokenizer(artifact), slots=1, max_queue=1)
    found: dict[str, list[Token]] = {name: [] for name in samplings}
    prompts = (range(start, start + PROMPT) for start in count(1))  # none goes on from another
    try:
        with Profile(model) as profile:

            def spent(sampling: SamplingParameters, tokens: int) -> tuple[float, float]:
                request = Request(next(prompts), tokens, sampling, stop_tokens=frozenset())
                inside, start = _seconds(profile), time.perf_counter()
                asyncio.run(_answer(engine, request))
                seconds = time.perf_counter() - start
                return seconds, seconds - (_seconds(profile) - inside)

            for _ in range(rounds):
                for name, sampling in samplings.items():
                    one, all_of_them = spent(sampling, 1), spent(sampling, tokens + 1)
                    more = [(b - a) / tokens for a, b in zip(one, all_of_them, strict=True)]
                    found[name].append(Token(*more))
    finally:
        engine.close()
    return found


async def _answer(engine: Engine, request: Request) -> None:
    async with engine.submit(request) as stream:
        async for _ in stream:
            pass


def _seconds(profile: Profile) -> float:
    return sum(cost.seconds for cost in profile.costs())


def table(threads: int, found: Mapping[str, list[Token]]) -> str:
    """The medians as rows of a Markdown table."""
    lines = [
        "| outside kernels | threads | us | of a token, us | share, % | must |",
        "|---|---|---|---|---|---|",
    ]
    for name, answers in found.items():
        outside, whole = (median(values) * 1e6 for values in zip(*map(_both, answers), strict=True))
        share = median(token.share for token in answers)
        must = f"< {MUST:g}" + (" ✗" if share >= MUST else "") if name == "greedy" else ""
        lines.append(f"| {name} | {threads} | {outside:.0f} | {whole:.0f} | {share:.1f} | {must} |")
    return "\n".join(lines)


def _both(token: Token) -> tuple[float, float]:
    return token.outside, token.seconds


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.outside", description=__doc__.splitlines()[0])
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    artifact = Artifact.open(arguments.artifact)
    print(table(arguments.threads, measure(artifact, arguments.threads)))


if __name__ == "__main__":
    main()
