"""`emberc bench`: how fast an artifact runs here, how near to the memory's limit, and where its
time goes."""

from __future__ import annotations

import argparse
import random
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from emberd.compile.bandwidth import MemoryRead
from emberd.compile.traffic import decode_traffic
from emberd.daemon.artifact import Artifact
from emberd.daemon.core import Model
from emberd.daemon.errors import EmberdError
from emberd.daemon.profile import KernelCost, Profile
from emberd.daemon.program import Program
from emberd.daemon.session import LogitsRole, Session

_ROUNDS = 5
_DECODED = 32  # tokens of one round
_PROMPT = 512
_BAR = 24  # characters of the longest bar, where there is room
_COLUMNS = 120  # of the output when it is no terminal
_FIGURES = 36  # characters between a kernel's name and its bar
_NAME = 20  # characters that a kernel's name keeps however little room there is


@dataclass(frozen=True)
class Timing:
    """Seconds of each round of `tokens` tokens, and what the kernels cost in all of them."""

    tokens: int
    rounds: tuple[float, ...]
    costs: Sequence[KernelCost]

    @property
    def rate(self) -> float:
        """Tokens per second, median of the rounds."""
        return self.tokens / median(self.rounds)

    @property
    def best_rate(self) -> float:
        return self.tokens / min(self.rounds)


@dataclass(frozen=True)
class Result:
    """`read`: memory read in bytes per second between the rounds of decoding, median;
    `kernel_bytes`: what each kernel must move for a decoded token."""

    threads: int
    context: int
    decode: Timing
    prefill: Timing
    read: float
    token_bytes: float
    kernel_bytes: Mapping[str, float]


def measure(artifact: Artifact, threads: int | None, context: int) -> Result:
    """Decodes after `context` tokens, and prefills from nothing.

    Raises EmberdError when the model's context is too short for that.
    """
    with Model(artifact, threads) as model:
        prompt = min(_PROMPT, model.max_context)
        decoded = _ROUNDS * _DECODED
        needed = context + 1 + decoded
        if context < 0 or needed > model.max_context:
            most = model.max_context - 1 - decoded
            raise EmberdError(f"--context {context}: expected 0 to {most} tokens for this model")
        draw = random.Random(0)
        read = MemoryRead()
        with model.open_session(max(needed, prompt)) as session, Profile(model) as prefill:
            rounds = [_timed_prefill(session, _tokens(draw, model, prompt)) for _ in range(_ROUNDS)]
        prefilled = Timing(prompt, tuple(rounds), prefill.costs())
        reads = []
        with model.open_session(needed) as session:
            session.prefill(_tokens(draw, model, context + 1))
            rounds = []
            with Profile(model) as decode:
                for _ in range(_ROUNDS):
                    rounds.append(_timed_decode(session, _tokens(draw, model, _DECODED)))
                    reads.append(read.measure(model.threads))
        program = Program.decode(artifact.program)
        traffic = decode_traffic(program, model.vocab_size, context + decoded // 2)
        return Result(
            threads=model.threads,
            context=context,
            decode=Timing(_DECODED, tuple(rounds), decode.costs()),
            prefill=prefilled,
            read=median(reads),
            token_bytes=traffic.total,
            kernel_bytes=traffic.by_symbol,
        )


def summary(result: Result) -> str:
    """Rates, and the bytes that decoding moves against what the memory can give."""
    decode, prefill = result.decode, result.prefill
    moved = result.token_bytes * decode.rate
    return "\n".join(
        [
            f"threads      {result.threads}",
            f"memory read  {result.read / 1e9:.1f} GB/s",
            f"decode       {decode.rate:.1f} tok/s after {result.context} tokens "
            f"(best {decode.best_rate:.1f})",
            f"             {result.token_bytes / 1e6:.1f} MB a token: {moved / 1e9:.1f} GB/s, "
            f"{moved / result.read:.0%} of memory read",
            f"prefill      {prefill.rate:.1f} tok/s of {prefill.tokens} tokens "
            f"(best {prefill.best_rate:.1f})",
        ]
    )


def kernel_table(
    timing: Timing, units: int, kernel_bytes: Mapping[str, float], columns: int
) -> str:
    """One line per kernel, the most expensive first, and one for what is outside kernels.

    Time and calls are of one of `units` equal parts of what was timed (a token, a prompt), and so
    is `kernel_bytes`; a kernel that is not in it gets no MB and GB/s. The bar is the share of time.
    Where lines of `columns` characters are too short for it, bars shrink, then names are cut.
    """
    total = sum(timing.rounds)
    inside = sum(cost.seconds for cost in timing.costs)
    costs = [*timing.costs, KernelCost("(outside kernels)", units, total - inside)]
    longest = max(cost.seconds for cost in costs)
    width = min(max(len(cost.symbol) for cost in costs), max(_NAME, columns - _FIGURES))
    bar = max(0, min(_BAR, columns - width - _FIGURES - 1))
    lines = [f"{'kernel':{width}}      us  calls     MB   GB/s  share"]
    for cost in costs:
        moved = kernel_bytes.get(cost.symbol, 0) * units
        traffic = f"{moved / units / 1e6:6.2f} {moved / cost.seconds / 1e9:6.1f}" if moved else ""
        name = _cut(cost.symbol, width)
        lines.append(
            f"{name:{width}} {cost.seconds / units * 1e6:7.0f} {cost.calls / units:6.0f} "
            f"{traffic:13} {cost.seconds / total:6.1%} "
            f"{'#' * round(bar * cost.seconds / longest)}".rstrip()
        )
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("artifact", type=Path, help="folder written by emberc build")
    parser.add_argument("--threads", type=int, help="default: one per physical core")
    parser.add_argument(
        "--context", type=int, default=0, help="tokens before the decoded ones (default 0)"
    )
    parser.add_argument("--profile", action="store_true", help="time and bytes of every kernel")


def run(arguments: argparse.Namespace) -> None:
    artifact = Artifact.open(arguments.artifact)
    result = measure(artifact, arguments.threads, arguments.context)
    print(summary(result))
    if arguments.profile:
        columns, _ = shutil.get_terminal_size((_COLUMNS, 0))
        decode = kernel_table(result.decode, _ROUNDS * _DECODED, result.kernel_bytes, columns)
        print(f"\ndecode, one token\n{decode}")
        prefill = kernel_table(result.prefill, _ROUNDS, {}, columns)
        print(f"\nprefill, {result.prefill.tokens} tokens\n{prefill}")


def _cut(name: str, width: int) -> str:
    return name if len(name) <= width else name[: width - 2] + ".."


def _tokens(draw: random.Random, model: Model, count: int) -> list[int]:
    return draw.choices(range(model.vocab_size), k=count)


def _timed_prefill(session: Session, tokens: list[int]) -> float:
    session.reset()
    start = time.perf_counter()
    session.prefill(tokens)
    return time.perf_counter() - start


def _timed_decode(session: Session, tokens: list[int]) -> float:
    start = time.perf_counter()
    for token in tokens:
        session.step([token], LogitsRole.LAST)
    return time.perf_counter() - start
