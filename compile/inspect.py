"""Describe a checkpoint from its headers: what it is, what it holds, what would be converted."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from emberd.compile.checkpoint.huggingface import Checkpoint, Ignored, Mapped
from emberd.compile.checkpoint.stop_tokens import find_stop_tokens
from emberd.compile.converted import MIXERS

_EXPERT_WEIGHTS = ("experts_gate_up", "experts_down")
_LISTED_PROBLEMS = 10


@dataclass(frozen=True)
class Parameters:
    """Counts of weights; `active` is what one token passes through (the head, but no embedding
    beyond its own row)."""

    total: int
    active: int
    experts: int
    embedding: int


@dataclass(frozen=True)
class Report:
    """Everything that `emberc inspect` says."""

    source: str
    architecture: str
    dimensions: dict[str, Any]
    stack: list[str]
    parameters: Parameters
    dtypes: dict[str, int]
    bytes: int
    shards: int
    tensors: int
    stop_tokens: list[int]
    tied_embeddings: bool
    layers_with_router: int
    layers_with_experts: int
    missing: list[str]
    problems: list[str]
    ignored: list[Ignored]


def inspect(source: Path | str) -> Report:
    """Describe the checkpoint folder `source` without reading a weight.

    Raises EmberdError when its configuration or a header is wrong; tensors that are missing or of
    the wrong shape are part of the report.
    """
    checkpoint = Checkpoint.open(source)
    mapped = checkpoint.map()
    configuration = checkpoint.configuration
    used = [checkpoint.tensors[name] for name in sorted(mapped.used)]
    dtypes: Counter[str] = Counter()
    for tensor in used:
        dtypes[tensor.dtype] += tensor.bytes
    return Report(
        source=str(source),
        architecture=configuration.architecture,
        dimensions=asdict(configuration.dimensions),
        stack=list(configuration.mixers),
        parameters=_parameters(checkpoint, mapped),
        dtypes=dict(dtypes),
        bytes=sum(tensor.bytes for tensor in used),
        shards=len(checkpoint.shards),
        tensors=len(used),
        stop_tokens=find_stop_tokens(checkpoint),
        tied_embeddings=checkpoint.tied,
        layers_with_router=_layers_with(mapped, ("router",)),
        layers_with_experts=_layers_with(mapped, _EXPERT_WEIGHTS),
        missing=mapped.missing,
        problems=mapped.problems,
        ignored=checkpoint.ignored(),
    )


def text(report: Report) -> str:
    """The report as aligned lines for people."""
    rows = list(_rows(report))
    width = max(len(label) for label, _ in rows)
    return "\n".join(f"{label:<{width}}  {value}".rstrip() for label, value in rows)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, help="a Hugging Face checkpoint folder")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(arguments: argparse.Namespace) -> None:
    report = inspect(arguments.source)
    print(json.dumps(asdict(report), indent=2) if arguments.json else text(report))


def _parameters(checkpoint: Checkpoint, mapped: Mapped) -> Parameters:
    dimensions = checkpoint.configuration.dimensions
    total = active = experts = embedding = 0
    for instance in mapped.stack:
        for name, reference in instance.weights.items():
            count = reference.elements
            if name == "embedding":
                embedding, count_active = count, dimensions.hidden_size
            elif name in _EXPERT_WEIGHTS:
                experts += count
                count_active = count // dimensions.moe.experts * dimensions.moe.top_k
            else:
                count_active = count
            total += 0 if name == "lm_head" and checkpoint.tied else count
            active += count_active
    return Parameters(total, active, experts, embedding)


def _layers_with(mapped: Mapped, weights: tuple[str, ...]) -> int:
    moes = [instance for instance in mapped.stack if instance.block == "moe"]
    return sum(all(weight in moe.weights for weight in weights) for moe in moes)


def _rows(report: Report) -> Iterator[tuple[str, str]]:
    dimensions, parameters = report.dimensions, report.parameters
    layers = len(report.stack)
    yield "source", report.source
    yield "architecture", report.architecture
    yield "parameters", f"{_count(parameters.total)}, {_count(parameters.active)} active per token"
    yield "  in experts", _count(parameters.experts)
    yield "  in the embedding", _count(parameters.embedding)
    stored = ", ".join(f"{dtype} {_size(size)}" for dtype, size in sorted(report.dtypes.items()))
    yield "weights", f"{_size(report.bytes)} in {_many(report.tensors, 'tensor')}: {stored}"
    yield "files", _many(report.shards, "shard")
    yield "hidden size", str(dimensions["hidden_size"])
    tied = ", embedding and head tied" if report.tied_embeddings else ""
    yield "vocabulary", f"{dimensions['vocab_size']}{tied}"
    yield "longest context", f"{dimensions['max_context']} tokens"
    yield "stop tokens", ", ".join(map(str, report.stop_tokens)) or "none named"
    yield "layers", f"{layers}: {_runs(report.stack)}"
    for kind in MIXERS:
        sizes = dimensions["attention" if kind == "gated_attention" else kind]
        if sizes is not None:
            yield f"  {kind}", f"{_many(report.stack.count(kind), 'layer')}, {_sizes(sizes)}"
    yield "  moe", f"{_many(layers, 'layer')}, {_sizes(dimensions['moe'])}"
    yield "  routers", f"present in {report.layers_with_router} of {layers} layers"
    yield "  expert tensors", f"present in {report.layers_with_experts} of {layers} layers"
    for part in report.ignored:
        size = f"{_many(part.tensors, 'tensor')}, {_size(part.bytes)}"
        yield "ignored", f"{part.part} ({size}): {part.reason}"
    for problem in report.problems[:_LISTED_PROBLEMS]:
        yield "problem", problem
    if len(report.problems) > _LISTED_PROBLEMS:
        yield "problem", f"and {len(report.problems) - _LISTED_PROBLEMS} more like these"
    yield "convertible", "no" if report.problems else "yes, as far as headers tell"


def _runs(stack: list[str]) -> str:
    """The stack as its runs, and a repeated pattern only once."""
    for period in range(1, len(stack) // 2 + 1):
        repeats, rest = divmod(len(stack), period)
        if not rest and stack == stack[:period] * repeats:
            pattern = _runs_of(stack[:period])
            return f"{repeats} x ({pattern})" if period > 1 else f"{repeats} x {stack[0]}"
    return _runs_of(stack)


def _runs_of(stack: list[str]) -> str:
    return " + ".join(f"{len(list(run))} {kind}" for kind, run in groupby(stack))


def _sizes(sizes: dict[str, Any]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value:.12g}" for name, value in sizes.items())


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _count(count: int) -> str:
    """A count of parameters to three or four digits."""
    for unit, scale in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return str(count)


def _size(size: int) -> str:
    """A size in bytes to three or four digits, in powers of 1000 as disks are sold."""
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= scale:
            return f"{size / scale:.2f} {unit}"
    return f"{size} bytes"
