"""`emberc plan`: whether a model fits a device, how, and how fast, from headers alone."""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from emberd.compile.bandwidth import MemoryRead
from emberd.compile.build import CHUNK_SIZES
from emberd.compile.checkpoint.huggingface import Checkpoint
from emberd.compile.convert import convert_structure
from emberd.compile.converted import MODEL_FILE, ConvertedModel
from emberd.compile.isa.isa import ISAS
from emberd.compile.layout import lay_out
from emberd.compile.pipeline import compile_blocks
from emberd.compile.quantize.recipes import RECIPES
from emberd.compile.residency.estimate import PROCESS_BYTES, Device, Estimate, Sizes, Use, estimate
from emberd.compile.residency.sizes import read_rate, read_size, size
from emberd.daemon.activation_map import ActivationMap
from emberd.daemon.errors import EmberdError
from emberd.daemon.machine import physical_cpus
from emberd.targets.registry import HOST, Target, UnknownTargetError, find_target

_COMPARED = ("q8", "q4", "q4a8")  # the most faithful first
_CONTEXT = 4096
_SESSIONS = 2
_SHOWN_GAIN = 1.02
_SAME = 0.9  # of the fastest recipe's rate is as good as fast


@dataclass(frozen=True)
class Choice:
    """What a recipe comes to on the device."""

    recipe: str
    sizes: Sizes
    estimate: Estimate

    @property
    def verdict(self) -> str:
        if self.estimate.hit_rate is None:
            return "does not fit"
        if self.estimate.slots == self.sizes.bank:
            return "fits whole"
        if self.estimate.slots < self.sizes.token_demand:
            return "below token_demand"
        return "streams experts"


@dataclass(frozen=True)
class Help:
    """A change, and the tokens per second that it would make of those without."""

    change: str
    tokens_per_second: float


@dataclass(frozen=True)
class Plan:
    """Everything that `emberc plan` says. `best`: a recipe, None where no recipe fits."""

    model: str
    target: str
    device: Device
    use: Use
    assumption: str
    choices: list[Choice]
    best: str | None
    helps: list[Help]


def make_plan(
    model: ConvertedModel,
    target: Target,
    device: Device,
    use: Use,
    recipes: Sequence[str] = _COMPARED,
    activation_map: ActivationMap | None = None,
) -> Plan:
    """The plan for `model`; nothing of its weights is read. Raises EmberdError where a recipe
    cannot take it, or the map is of a model of another shape."""
    moe = model.dimensions.moe
    shape = model.dimensions.layers, moe.experts, moe.top_k
    found = activation_map
    if found is not None and (found.layers, found.experts, found.top_k) != shape:
        raise EmberdError(
            f"the activation map is of {found.layers} layers of {found.experts} experts, this "
            f"model has {shape[0]} of {shape[1]}"
        )
    choices = []
    for name in recipes:
        compiled = compile_blocks(model, RECIPES[name], ISAS[target.isas[0]], list(CHUNK_SIZES))
        layout = lay_out(model, RECIPES[name], compiled)
        sizes = Sizes.of(layout, *shape, model.dimensions.vocab_size)
        choices.append(Choice(name, sizes, estimate(sizes, device, use, found)))
    best = _best(choices)
    return Plan(
        model=model.name,
        target=target.name,
        device=device,
        use=use,
        assumption=_assumption(found),
        choices=choices,
        best=None if best is None else best.recipe,
        helps=[] if best is None else _helps(best, choices, device, use, found),
    )


def text(plan: Plan) -> str:
    """The plan for people."""
    device, use = plan.device, plan.use
    lines = [
        f"{plan.model} on {plan.target}: {size(device.memory)} of memory read at "
        f"{size(device.bandwidth)}/s, disk read at {size(device.disk)}/s",
        f"{use.sessions} x {use.context} tokens of context; rates are of a session at its end",
        "",
        f"{'recipe':<7}{'on disk':>10}{'beside experts':>16}{'experts in memory':>22}"
        f"{'hits':>7}{'tok/s':>8}  ",
    ]
    for choice in plan.choices:
        sizes, made = choice.sizes, choice.estimate
        slots = f"{made.slots} of {sizes.bank}"
        hits = "" if made.hit_rate is None else f"{made.hit_rate:.0%}"
        rate = "" if made.hit_rate is None else _shown(_rate(made))
        lines.append(
            f"{choice.recipe:<7}{size(sizes.weights_bytes + sizes.bank_bytes):>10}"
            f"{size(made.fixed_bytes):>16}{slots:>22}{hits:>7}{rate:>8}  {choice.verdict}"
        )
    lines += ["", f"hits: {plan.assumption}"]
    if plan.best is None:
        least = min(choice.estimate.fixed_bytes for choice in plan.choices)
        lines += ["", f"does not fit: at least {size(least)} are needed beside the experts"]
        return "\n".join(lines)
    best = next(choice for choice in plan.choices if choice.recipe == plan.best)
    return "\n".join([*lines, "", *_explained(best, plan), *_helped(best, plan)])


def _explained(best: Choice, plan: Plan) -> Iterator[str]:
    sizes, made, use = best.sizes, best.estimate, plan.use
    cache = use.sessions * sizes.kv_bytes_per_token * use.context
    state = use.sessions * (sizes.state_bytes + sizes.logits_bytes)
    yield f"use {best.recipe}: {best.verdict}"
    yield (
        f"  memory    weights {size(sizes.weights_bytes)}, KV cache {size(cache)}, recurrent state "
        f"and logits {size(state)}, scratch {size(sizes.scratch_bytes)}, process "
        f"{size(PROCESS_BYTES)}; experts {size(made.slots * sizes.expert_bytes)} of "
        f"{size(sizes.bank_bytes)} ({size(sizes.expert_bytes)} each)"
    )
    demand = sizes.token_demand
    yield f"  a token   token_demand {demand} experts, {size(demand * sizes.expert_bytes)}"
    yield (
        f"            {1000 * made.memory_seconds:.1f} ms to read memory, "
        f"{1000 * made.disk_seconds:.1f} ms to read {(1 - (made.hit_rate or 0)) * demand:.1f} "
        "experts from disk"
    )
    missing = (sizes.bank - made.slots) * sizes.expert_bytes
    if missing:
        yield (
            f"  a prompt  reads up to {size(missing)} once for every {CHUNK_SIZES[-1]} tokens: "
            f"{missing / plan.device.disk:.1f} s"
        )


def _helped(best: Choice, plan: Plan) -> Iterator[str]:
    if plan.helps:
        yield "what would help most"
    for entry in plan.helps:
        before, after = _shown(_rate(best.estimate)), _shown(entry.tokens_per_second)
        yield f"  {entry.change}: {before} -> {after} tok/s"


def _best(choices: Sequence[Choice]) -> Choice | None:
    """The most faithful recipe that fits whole, else the most faithful of the fast ones."""
    running = [choice for choice in choices if choice.estimate.hit_rate is not None]
    whole = [choice for choice in running if choice.estimate.slots == choice.sizes.bank]
    if whole:
        return whole[0]
    fastest = max((_rate(choice.estimate) for choice in running), default=0.0)
    return next((c for c in running if _rate(c.estimate) >= _SAME * fastest), None)


def _helps(
    best: Choice,
    choices: Sequence[Choice],
    device: Device,
    use: Use,
    found: ActivationMap | None,
) -> list[Help]:
    """Changes that matter, the best first."""
    sizes = best.sizes
    whole = sizes.fixed_bytes(use) + sizes.bank_bytes
    changed = [
        ("half as much memory again", replace(device, memory=device.memory * 3 // 2), use),
        (f"memory for all experts ({size(whole)})", replace(device, memory=whole), use),
        ("a disk twice as fast", replace(device, disk=2 * device.disk), use),
        ("memory twice as fast", replace(device, bandwidth=2 * device.bandwidth), use),
        ("one session", device, replace(use, sessions=1)),
        ("half the context", device, replace(use, context=use.context // 2)),
    ]
    helps = [
        Help(change, rate)
        for change, other, used in changed
        if other.memory >= device.memory
        if (rate := _rate(estimate(sizes, other, used, found)))
    ]
    helps += [Help(f"recipe {choice.recipe}", _rate(choice.estimate)) for choice in choices]
    least = _rate(best.estimate) * _SHOWN_GAIN
    return sorted(
        (entry for entry in helps if entry.tokens_per_second > least),
        key=lambda entry: -entry.tokens_per_second,
    )


def _rate(made: Estimate) -> float:
    """Tokens per second, 0 where the model cannot run."""
    return made.tokens_per_second or 0.0


def _shown(rate: float) -> str:
    return f"{rate:.0f}" if rate >= 100 else f"{rate:.3g}"


def _assumption(found: ActivationMap | None) -> str:
    if found is None:
        return (
            "every expert taken to be as likely as any other; commands of a kind do better: "
            "profile them (emberc profile) and give --map"
        )
    return "of the experts that the map has most mass for, by class, weighted by how common each is"


@contextmanager
def _opened(source: Path) -> Iterator[ConvertedModel]:
    """A converted model, or a checkpoint's structure as one."""
    if (source / MODEL_FILE).is_file():
        yield ConvertedModel.load(source)
        return
    with tempfile.TemporaryDirectory() as folder:
        yield convert_structure(Checkpoint.open(source), Path(folder) / "converted")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, help="checkpoint folder, or a converted model")
    parser.add_argument("--target", default=HOST, help="target name, or host (this machine)")
    parser.add_argument("--memory", required=True, metavar="SIZE", help="for the daemon, as in 6G")
    parser.add_argument(
        "--disk", required=True, metavar="RATE", help="what the disk is read at, as in 400MB/s"
    )
    parser.add_argument(
        "--bandwidth",
        metavar="RATE",
        help="what memory is read at (default: measured here, if this machine is of the target)",
    )
    parser.add_argument(
        "--recipe", choices=RECIPES, help=f"(default: compare {', '.join(_COMPARED)})"
    )
    parser.add_argument("--map", type=Path, help="activation map of the model, for the hit rate")
    parser.add_argument(
        "--context", type=int, help=f"tokens of a session (default {_CONTEXT}, or the model's)"
    )
    parser.add_argument(
        "--sessions", type=int, default=_SESSIONS, help="at a time (default %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(arguments: argparse.Namespace) -> None:
    try:
        target = find_target(arguments.target)
    except UnknownTargetError as error:
        raise EmberdError(str(error)) from None
    memory, disk = read_size(arguments.memory), read_rate(arguments.disk)
    found = None if arguments.map is None else ActivationMap.read(arguments.map)
    with _opened(arguments.source) as model:
        use = _use(arguments, model.dimensions.max_context)
        device = Device(memory, disk, _bandwidth(arguments.bandwidth, target))
        recipes = _COMPARED if arguments.recipe is None else (arguments.recipe,)
        plan = make_plan(model, target, device, use, recipes, found)
    print(json.dumps(_members(plan), indent=2) if arguments.json else text(plan))


def _use(arguments: argparse.Namespace, longest: int) -> Use:
    context = min(_CONTEXT, longest) if arguments.context is None else arguments.context
    if not 1 <= context <= longest:
        raise EmberdError(f"--context {context}: expected 1 to {longest} tokens for this model")
    if arguments.sessions < 1:
        raise EmberdError(f"--sessions {arguments.sessions}: expected 1 or more")
    return Use(arguments.sessions, context)


def _bandwidth(given: str | None, target: Target) -> int:
    if given is not None:
        return read_rate(given)
    if target.machine != platform.machine():
        raise EmberdError(
            f"this machine is no {target.name}: say what its memory is read at, as in "
            "--bandwidth 25GB/s"
        )
    read = MemoryRead()
    return int(max(read.measure(len(physical_cpus())) for _ in range(3)))


def _members(plan: Plan) -> dict[str, Any]:
    """The plan as JSON has it, what follows from other members included."""
    members = asdict(plan)
    for choice, entry in zip(plan.choices, members["choices"], strict=True):
        entry["verdict"] = choice.verdict
        entry["estimate"]["tokens_per_second"] = choice.estimate.tokens_per_second
        entry["sizes"]["token_demand_bytes"] = choice.sizes.token_demand * choice.sizes.expert_bytes
    return members
