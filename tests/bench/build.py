"""How long a build takes: `python -m bench.build`.

packing   bfloat16 weights of experts that are read, quantised and packed by one core, in MB of
          them a second; beside the same bytes read only
programs  of the real model's 40 layers of 256 experts, from the converted model to the program:
          passes for each block kind and number of tokens, and where everything lies
kernels   compiled and linked for each instruction set of a target

The 40 layers are a checkpoint of headers alone, so that neither 70 GB nor packing stand in the way.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from checkpoints import TinyModel
from emberd.compile.build import CHUNK_SIZES
from emberd.compile.checkpoint.huggingface import Checkpoint
from emberd.compile.convert import convert_structure
from emberd.compile.converted import ConvertedModel
from emberd.compile.isa.isa import ISAS
from emberd.compile.layout import lay_out
from emberd.compile.link import build_library
from emberd.compile.pipeline import compile_blocks
from emberd.compile.quantize.formats import FORMATS, pack_expert
from emberd.compile.quantize.recipes import RECIPES
from emberd.targets.registry import find_target

from bench import checkpoint
from bench.prepare import BUILD, RECIPE, prepare_converted

PACKING_MUST = 300  # MB/s of input, a core
BUILD_MUST = 120  # seconds for programs and kernels, those of one instruction set
_EXPERTS, _ROUNDS = 16, 7


@dataclass(frozen=True)
class Packing:
    """Bytes a second of each round: read and packed; read only."""

    packed: list[float]
    read: list[float]


def packing(model: ConvertedModel, format: str, experts: int, rounds: int) -> Packing:
    """By the core that this thread is bound to meanwhile, of the first `experts` of a layer."""
    weights = next(instance.weights for instance in model.stack if instance.block == "moe")
    banks = weights["experts_gate_up"], weights["experts_down"]
    of_an_expert = sum(bank.bytes // bank.shape[0] for bank in banks)

    def read(expert: int) -> object:
        return [model.read_expert(bank, expert) for bank in banks]

    def pack(expert: int) -> object:
        return pack_expert(FORMATS[format], *(model.read_expert(bank, expert) for bank in banks))

    def rate(work: Callable[[int], object]) -> float:
        start = time.perf_counter()
        for expert in range(experts):
            work(expert)
        return of_an_expert * experts / (time.perf_counter() - start)

    with _one_core():
        rate(read)  # into the page cache
        rounds_of = [(rate(pack), rate(read)) for _ in range(rounds)]
    packed, only_read = zip(*rounds_of, strict=True)
    return Packing(list(packed), list(only_read))


def compiling(model: TinyModel, isas: Sequence[str], chunks: Sequence[int]) -> dict[str, float]:
    """Seconds for the programs of a model, and for its kernels by instruction set."""
    recipe, seconds = RECIPES[RECIPE], {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        checkpoint.write_structure(folder / "checkpoint", model)
        converted = convert_structure(Checkpoint.open(folder / "checkpoint"), folder / "converted")
        start = time.perf_counter()
        compiled = compile_blocks(converted, recipe, ISAS[isas[0]], list(chunks))
        lay_out(converted, recipe, compiled)
        seconds["programs"] = time.perf_counter() - start
        for name in isas:
            start = time.perf_counter()
            build_library(compiled.kernels, ISAS[name])
            seconds[f"kernels for {name}"] = time.perf_counter() - start
    return seconds


@contextmanager
def _one_core() -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def table(packed: dict[str, Packing], seconds: dict[str, float]) -> str:
    """Markdown: medians, the best in brackets."""
    lines = ["| figure | measured | must |", "|---|---|---|"]
    for format, found in packed.items():
        rate, best = statistics.median(found.packed) / 1e6, max(found.packed) / 1e6
        read = statistics.median(found.read) / 1e6
        lines.append(
            f"| packing {format}, MB/s of bfloat16 a core (reading alone: {read:.0f}) "
            f"| {rate:.0f} ({best:.0f}) | ≥ {PACKING_MUST} |"
        )
    lines += [f"| {name}, s | {value:.1f} | |" for name, value in seconds.items()]
    lines.append(f"| all of these, s | {sum(seconds.values()):.1f} | ≤ {BUILD_MUST} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.build", description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="x86-64", help="default %(default)s")
    target = find_target(parser.parse_args().target)
    converted = prepare_converted(BUILD / "bench", checkpoint.write_fifth)
    packed = {name: packing(converted, name, _EXPERTS, _ROUNDS) for name in ("q8", "q4")}
    print(table(packed, compiling(checkpoint.WHOLE, target.isas, CHUNK_SIZES)))


if __name__ == "__main__":
    main()
