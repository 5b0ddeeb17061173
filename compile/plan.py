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
from emberd.compile.residency.sizes import size
from emberd.daemon.activation_map import ActivationMap
from emberd.daemon.errors import EmberdError
from emberd.daemon.machine import physical_cpus
from emberd.daemon.sizes import is_bare, read_rate, read_size
from emberd.targets.registry import HOST, Target, UnknownTargetError, find_target

_USUAL_DISKS = (100_000_000, 400_000_000, 2_000_000_000)  # cards, SATA, NVMe: bytes per second
_CONTEXT = 4096
_SESSIONS = 2
_SHOWN_GAIN = 1.02
_LEAST_MEMORY = 1 << 20  # without a unit
_LEAST_RATE = 10**6  # likewise
_SAME = 0.9  # of the fastest recipe's rate is as good as fast


@dataclass(frozen=True)
class Choice:
    """What a recipe comes to on the device; `rates`: tokens per second with each of the plan's
    disks, None where the model cannot run."""

    recipe: str
    sizes: Sizes
    estimate: Estimate
    rates: list[float | None]

    @property
    def whole(self) -> bool:
        """Whether all experts are in memory."""
        return self.estimate.slots == self.sizes.bank

    @property
    def expert_budget(self) -> int:
        """The daemon's setting: bytes of memory for experts, or -1 where all are in memory."""
        return -1 if self.whole else self.estimate.slots * self.sizes.expert_bytes

    @property
    def verdict(self) -> str:
        if self.estimate.hit_rate is None:
            return "does not fit"
        if self.whole:
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
    """Everything that `emberc plan` says. `disks`: bytes per second, the device's or some usual
    ones; `best`: a recipe, None where no recipe fits, or where it is another for another disk."""

    model: str
    target: str
    device: Device
    use: Use
    assumption: str
    disks: list[int]
    choices: list[Choice]
    best: str | None
    helps: list[Help]


def make_plan(
    model: ConvertedModel,
    target: Target,
    device: Device,
    use: Use,
    recipes: Sequence[str] = tuple(RECIPES),
    activation_map: ActivationMap | None = None,
) -> Plan:
    """The plan for `model`; nothing of its weights is read. `recipes`: the most faithful first.
    Raises EmberdError where a recipe cannot take it, or the map is of a model of another shape."""
    moe = model.dimensions.moe
    shape = model.dimensions.layers, moe.experts, moe.top_k
    found = activation_map
    if found is not None and (found.layers, found.experts, found.top_k) != shape:
        raise EmberdError(
            f"the activation map is of {found.layers} layers of {found.experts} experts, this "
            f"model has {shape[0]} of {shape[1]}"
        )
    disks = list(_USUAL_DISKS) if device.disk is None else [device.disk]
    choices = []
    for name in recipes:
        compiled = compile_blocks(model, RECIPES[name], ISAS[target.isas[0]], list(CHUNK_SIZES))
        layout = lay_out(model, RECIPES[name], compiled)
        sizes = Sizes.of(layout, *shape, model.dimensions.vocab_size)
        made = estimate(sizes, device, use, found)
        choices.append(Choice(name, sizes, made, [made.tokens_per_second(disk) for disk in disks]))
    best = _best(choices, len(disks))
    return Plan(
        model=model.name,
        target=target.name,
        device=device,
        use=use,
        assumption=_assumption(found),
        disks=disks,
        choices=choices,
        best=None if best is None else best.recipe,
        helps=[] if best is None else _helps(best, choices, device, use, found),
    )


def text(plan: Plan) -> str:
    """The plan for people."""
    device, use = plan.device, plan.use
    disk = "" if device.disk is None else f", disk read at {size(device.disk)}/s"
    heads = ["tok/s"] if device.disk else [f"{size(rate)}/s" for rate in plan.disks]
    lines = [
        f"{plan.model} on {plan.target}: {size(device.memory)} of memory read at "
        f"{size(device.bandwidth)}/s{disk}",
        f"{use.sessions} x {use.context} tokens of context; rates are of a session at its end",
        "",
        f"{'recipe':<7}{'on disk':>10}{'beside experts':>16}{'experts in memory':>19}"
        f"{'hits':>7}{'read a token':>14}{''.join(f'{head:>13}' for head in heads)}",
    ]
    for choice in plan.choices:
        sizes, made = choice.sizes, choice.estimate
        slots = f"{made.slots} of {sizes.bank}"
        hits = "" if made.hit_rate is None else f"{made.hit_rate:.0%}"
        read = "" if made.hit_rate is None else size(made.read_bytes)
        rates = "".join(f"{'' if rate is None else _shown(rate):>13}" for rate in choice.rates)
        lines.append(
            f"{choice.recipe:<7}{size(sizes.weights_bytes + sizes.bank_bytes):>10}"
            f"{size(made.fixed_bytes):>16}{slots:>19}{hits:>7}{read:>14}{rates}  {choice.verdict}"
        )
    lines += ["", f"hits: {plan.assumption}"]
    if device.disk is None:
        lines.append("rates: tok/s with disks read at so much, for want of --disk")
    if plan.best is None:
        return "\n".join([*lines, "", _undecided(plan)])
    best = next(choice for choice in plan.choices if choice.recipe == plan.best)
    explained = [*_explained(best, plan), *_settings(best, plan.use), *_helped(best, plan)]
    return "\n".join([*lines, "", *explained])


def _undecided(plan: Plan) -> str:
    """Why no recipe is the best."""
    if any(choice.estimate.hit_rate is not None for choice in plan.choices):
        return "which recipe is best depends on the disk: give --disk"
    least = min(choice.estimate.fixed_bytes for choice in plan.choices)
    return f"does not fit: at least {size(least)} are needed beside the experts"


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
    yield (
        f"  a token   needs {size(demand * sizes.expert_bytes)} of experts at once, {demand} of "
        f"them ({sizes.top_k} in each of {sizes.layers} layers): its token_demand"
    )
    if made.slots < demand:
        yield "            with memory for fewer, none that it used is there for the next token"
    disk, missed = plan.device.disk, made.read_bytes / sizes.expert_bytes
    took = f"{1000 * made.read_bytes / disk:.1f} ms to read " if disk else ""
    yield (
        f"            {1000 * made.memory_seconds:.1f} ms to read memory, {took}{missed:.1f} "
        "experts from disk"
    )
    missing = (sizes.bank - made.slots) * sizes.expert_bytes
    if missing:
        took = f": {missing / disk:.1f} s" if disk else ""
        yield (
            f"  a prompt  reads up to {size(missing)} once for every {CHUNK_SIZES[-1]} tokens{took}"
        )


def _settings(best: Choice, use: Use) -> Iterator[str]:
    """What has the daemon do as planned; nothing where it does without."""
    if not best.whole:
        yield "write into the file of emberd serve --config"
        yield f"  expert_budget: {best.expert_budget}"
        yield f"  slots: {use.sessions}"
        yield f"  context: {use.context}"


def _helped(best: Choice, plan: Plan) -> Iterator[str]:
    if plan.helps:
        yield "what would help most"
    before = _shown(_rate(best.estimate, plan.device.disk))
    for entry in plan.helps:
        after = _shown(entry.tokens_per_second)
        yield f"  {entry.change}: {before} -> {after} tok/s"


def _best(choices: Sequence[Choice], disks: int) -> Choice | None:
    """The most faithful recipe that fits whole, else the most faithful of the fast ones, if it is
    the same with all disks. Floats, which are for checking, only where nothing else is compared.
    """
    running = [choice for choice in choices if choice.estimate.hit_rate is not None]
    served = [c for c in running if RECIPES[c.recipe].activations != "float32"] or running
    if whole := [choice for choice in served if choice.whole]:
        return whole[0]
    fast = [_fast(served, disk) for disk in range(disks) if served]
    return fast[0] if fast and all(choice is fast[0] for choice in fast) else None


def _fast(choices: Sequence[Choice], disk: int) -> Choice:
    """The most faithful that is about as fast as the fastest with one of the plan's disks."""
    rates = [choice.rates[disk] or 0.0 for choice in choices]
    fastest = max(rates)
    return next(c for c, rate in zip(choices, rates, strict=True) if rate >= _SAME * fastest)


def _helps(
    best: Choice,
    choices: Sequence[Choice],
    device: Device,
    use: Use,
    found: ActivationMap | None,
) -> list[Help]:
    """Changes that matter, the best first; none where the disk's rate would matter, unknown."""
    sizes, now = best.sizes, _rate(best.estimate, device.disk)
    if not now:
        return []
    disk = None if device.disk is None else 2 * device.disk
    whole = sizes.fixed_bytes(use) + sizes.bank_bytes
    changed = [
        ("half as much memory again", replace(device, memory=device.memory * 3 // 2), use),
        (f"memory for all experts ({size(whole)})", replace(device, memory=whole), use),
        ("a disk twice as fast", replace(device, disk=disk), use),
        ("memory twice as fast", replace(device, bandwidth=2 * device.bandwidth), use),
        ("one session", device, replace(use, sessions=1)),
        ("half the context", device, replace(use, context=use.context // 2)),
    ]
    helps = [
        Help(change, rate)
        for change, other, used in changed
        if other.memory >= device.memory
        if (rate := _rate(estimate(sizes, other, used, found), other.disk))
    ]
    helps += [Help(f"recipe {c.recipe}", _rate(c.estimate, device.disk)) for c in choices]
    least = now * _SHOWN_GAIN
    return sorted(
        (entry for entry in helps if entry.tokens_per_second > least),
        key=lambda entry: -entry.tokens_per_second,
    )


def _rate(made: Estimate, disk: int | None) -> float:
    """Tokens per second, 0 where there are none, or none known."""
    return made.tokens_per_second(disk) or 0.0


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
    usual = ", ".join(f"{rate // 10**6}MB/s" for rate in _USUAL_DISKS)
    parser.add_argument(
        "--disk",
        metavar="RATE",
        help=f"what the disk is read at, as in 400MB/s (default: rates for {usual})",
    )
    parser.add_argument(
        "--bandwidth",
        metavar="RATE",
        help="what memory is read at (default: measured here, if this machine is of the target)",
    )
    parser.add_argument(
        "--recipe", choices=RECIPES, help=f"(default: compare {', '.join(RECIPES)})"
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
    memory = _memory(arguments.memory)
    disk = None if arguments.disk is None else _rate_of("--disk", arguments.disk, "MB/s")
    found = None if arguments.map is None else ActivationMap.read(arguments.map)
    with _opened(arguments.source) as model:
        use = _use(arguments, model.dimensions.max_context)
        device = Device(memory, _bandwidth(arguments.bandwidth, target), disk)
        recipes = tuple(RECIPES) if arguments.recipe is None else (arguments.recipe,)
        plan = make_plan(model, target, device, use, recipes, found)
    print(json.dumps(_members(plan), indent=2) if arguments.json else text(plan))


def _use(arguments: argparse.Namespace, longest: int) -> Use:
    context = min(_CONTEXT, longest) if arguments.context is None else arguments.context
    if not 1 <= context <= longest:
        raise EmberdError(f"--context {context}: expected 1 to {longest} tokens for this model")
    if arguments.sessions < 1:
        raise EmberdError(f"--sessions {arguments.sessions}: expected 1 or more")
    return Use(arguments.sessions, context)


def _memory(given: str) -> int:
    """Raises EmberdError for what is no size, or a number that lacks its unit."""
    memory = read_size(given)
    if memory < _LEAST_MEMORY and is_bare(given):
        raise EmberdError(f"--memory {given}: {memory} bytes; did you mean {given}G?")
    return memory


def _rate_of(option: str, given: str, unit: str) -> int:
    """Raises EmberdError for what is no rate, or a number that lacks its unit."""
    rate = read_rate(given)
    if rate < _LEAST_RATE and is_bare(given):
        raise EmberdError(f"{option} {given}: {rate} bytes/s; did you mean {given}{unit}?")
    return rate


def _bandwidth(given: str | None, target: Target) -> int:
    if given is not None:
        return _rate_of("--bandwidth", given, "GB/s")
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
        entry["expert_budget"] = choice.expert_budget
        entry["sizes"]["token_demand_bytes"] = choice.sizes.token_demand * choice.sizes.expert_bytes
    return members
