"""`emberc profile`: runs typical commands and writes which experts they choose."""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from emberd.compile.files import write_whole
from emberd.compile.residency.commands import Command, CommandReader
from emberd.compile.residency.counts import RoutingCounts
from emberd.compile.residency.coverage import coverage_table
from emberd.compile.residency.next_layer import NextLayerRouters
from emberd.compile.residency.recorder import STREAMS, Recorder
from emberd.compile.residency.trace import TraceHeader, TraceWriter
from emberd.daemon.activation_map import most_classes
from emberd.daemon.artifact import Artifact
from emberd.daemon.core import Model
from emberd.daemon.errors import EmberdError
from tqdm import tqdm

_SAVE_SECONDS = 20.0
_MAX_TOKENS = 64
_STEPS = 4000


class _State:
    """Where a run stands, in a file beside its output, so that a killed one can go on.

    `key` is what the run was asked for. Raises EmberdError when the file is of another run.
    """

    def __init__(self, output: Path, key: str, counts: RoutingCounts) -> None:
        self._path = output.with_name(f"{output.name}.profile")
        self._key = key
        self._counts = counts
        self._saved = time.monotonic()
        self.done = 0
        self.trace_bytes = 0
        if self._path.exists():
            self._read()

    @property
    def due(self) -> bool:
        """Whether it is time to save."""
        return time.monotonic() - self._saved > _SAVE_SECONDS

    def save(self, done: int, trace_bytes: int) -> None:
        head = {"key": self._key, "done": done, "trace_bytes": trace_bytes}
        arrays: dict[str, Any] = {"head": np.array(json.dumps(head)), **self._counts.arrays()}
        write_whole(self._path, lambda file: np.savez(file, **arrays))
        self._saved = time.monotonic()

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)

    def _read(self) -> None:
        try:
            with np.load(io.BytesIO(self._path.read_bytes())) as arrays:
                head = json.loads(str(arrays["head"]))
                if head["key"] == self._key:
                    self._counts.restore(arrays)
                    self.done, self.trace_bytes = int(head["done"]), int(head["trace_bytes"])
        except (OSError, ValueError, KeyError, EOFError) as error:
            raise EmberdError(f"{self._path}: not readable ({error}): remove it") from error
        if head["key"] != self._key:
            raise EmberdError(
                f"{self._path} is where a run with another artifact, other commands or options was "
                "left: finish that one, or remove the file"
            )


def profile(
    artifact: Artifact,
    commands: Path,
    output: Path,
    trace: Path | None = None,
    threads: int | None = None,
    max_tokens: int = _MAX_TOKENS,
    network: Path | None = None,
    steps: int = _STEPS,
) -> str:
    """Writes the activation map of the commands; goes on where a killed run with the same
    arguments was. `trace`: also writes the routing of every token; `network`: and trains a
    predictor on it, in so many steps. Returns a sentence about the run, and what the classes' hot
    experts cover. Raises EmberdError, naming the line at fault.
    """
    if not artifact.model.identity:
        raise EmberdError(f"{artifact.path}: built by an older emberc, build it again")
    train = None if network is None else _training()
    next_layer = None if trace is None else NextLayerRouters(artifact)
    with ExitStack() as stack:
        opened = artifact if next_layer is None else next_layer.artifact
        model = stack.enter_context(Model(opened, threads))
        shape = model.experts.layers, model.experts.experts, model.experts.top_k
        counts = RoutingCounts(*shape)
        key = _key(artifact, commands, max_tokens, trace)
        state = _State(output, key, counts)
        reader = CommandReader(artifact, model.max_context)
        todo = list(_shown(reader.read(commands), "reading commands"))
        if not todo:
            raise EmberdError(f"{commands}: no commands")
        names, most = {command.command_class for command in todo}, most_classes(*shape[:2])
        if len(names) > most:
            raise EmberdError(
                f"{commands}: {len(names)} classes, but a map of this model holds {most}"
            )
        writer = None
        if trace is not None and next_layer is not None:
            header = TraceHeader(
                artifact.model.identity, *shape, model.experts.expert_bytes, next_layer.count
            )
            writer = TraceWriter(trace, header, state.trace_bytes)
            stack.callback(writer.close)
        recorder = Recorder(model, artifact.model.stop_tokens, max_tokens, next_layer)
        done, tokens, start = state.done, 0, time.monotonic()
        traced = 0  # bytes of commands in the trace
        with tqdm(
            total=len(todo), initial=done, unit=" commands", disable=not sys.stderr.isatty()
        ) as bar:
            for group in _groups(todo[done:]):
                for found in recorder.run(group):
                    counts.add(found.command_class, found.ids)
                    tokens += len(found.ids)
                    if writer is not None:
                        writer.append(found)
                done += len(group)
                bar.update(len(group))
                rate = (done - state.done) / (time.monotonic() - start) * 3600
                bar.set_postfix_str(f"{rate:.0f} an hour", refresh=False)
                if state.due:
                    state.save(done, 0 if writer is None else writer.sync())
        if writer is not None:
            traced = writer.sync()
            writer.finish(done)
        made = counts.to_map(artifact.model.identity)
        data = made.to_bytes()
        write_whole(output, lambda file: file.write(data))
        seconds = time.monotonic() - start
        if train is not None and trace is not None and network is not None:
            state.save(done, traced)
            train(trace, network, steps)
        state.remove()
    ran = len(todo) - state.done
    return (
        f"{ran} commands, {tokens} tokens in {seconds:.1f} s: {ran / seconds * 3600:.0f} commands "
        f"an hour; map of {len(data)} bytes\n{coverage_table(made)}"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("artifact", type=Path, help="folder written by emberc build")
    parser.add_argument(
        "--commands",
        type=Path,
        required=True,
        help='JSON lines {"class": ..., "prompt": TEXT} or {"class": ..., "messages": [...]}',
    )
    parser.add_argument("-o", "--output", type=Path, required=True, help="map to write")
    parser.add_argument("--trace", type=Path, help="also write the routing of every token here")
    parser.add_argument(
        "--train",
        type=Path,
        metavar="FILE.onnx",
        help="also train a network on --trace that predicts routing, for emberc predict and "
        "simulate (needs torch: in a clone of emberd, pip install '.[train]')",
    )
    parser.add_argument(
        "--steps", type=int, default=_STEPS, help="of the training (default %(default)s)"
    )
    parser.add_argument("--threads", type=int, help="default: one per physical core")
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=_MAX_TOKENS,
        help="of the answer to a command that does not come with one (default %(default)s)",
    )


def run(arguments: argparse.Namespace) -> None:
    if arguments.max_tokens < 0:
        raise EmberdError(f"--max-tokens {arguments.max_tokens}: expected 0 or more")
    if arguments.steps < 1:
        raise EmberdError(f"--steps {arguments.steps}: expected 1 or more")
    if arguments.train is not None and arguments.trace is None:
        raise EmberdError("--train: say with --trace where to keep the routing that it learns from")
    print(
        profile(
            Artifact.open(arguments.artifact),
            arguments.commands,
            arguments.output,
            arguments.trace,
            arguments.threads,
            arguments.max_tokens,
            arguments.train,
            arguments.steps,
        )
    )
    written = [arguments.output, arguments.trace, arguments.train]
    print(f"wrote {', '.join(str(path) for path in written if path is not None)}")


def _training() -> Callable[[Path, Path, int], None]:
    try:
        from emberd.compile.predict.train import train_on
    except ModuleNotFoundError as error:
        raise EmberdError(
            f"--train: {error.name} is not installed: in a clone of emberd, pip install '.[train]'"
        ) from None
    return train_on


def _shown(commands: Iterator[Command], label: str) -> Iterator[Command]:
    return iter(tqdm(commands, desc=label, leave=False, disable=not sys.stderr.isatty()))


def _groups(commands: Sequence[Command]) -> Iterator[list[Command]]:
    rest = iter(commands)
    while group := list(islice(rest, STREAMS)):
        yield group


def _key(artifact: Artifact, commands: Path, max_tokens: int, trace: Path | None) -> str:
    """What a run is asked for: only the same one can go on where it was left."""
    try:
        content = hashlib.blake2b(commands.read_bytes(), digest_size=32).hexdigest()
    except OSError as error:
        raise EmberdError(f"{commands}: cannot be read: {error.strerror}") from None
    traced = None if trace is None else str(trace.resolve())
    return json.dumps([artifact.digest, content, max_tokens, traced])
