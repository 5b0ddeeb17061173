"""How long `emberd serve` takes to its first token, and what it weighs: `python -m bench.starts`.

Every figure is taken from outside, over HTTP, of a real process, with a chat of about 16 tokens
that no cache has seen; beside llama-server, in turns, where one is given. The page cache is as it
is found: run it twice for warm figures.

exec       from starting the process to the first token of a request that is sent at once
listening  from starting the process to the first connection that is taken
phases     of the start: when the daemon first did something, in seconds from its start; those
           of loading are a thread's beside the imports of the server
wake       from request to first token of an unloaded model, minus the same of a loaded one
idle       resident memory of the process while its model is unloaded
cold       wake with nothing of the model in the page cache, and memory for a part of the experts:
           with an activation map, without, and the disk alone (see bench/cold.py)
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path

from bench import cold
from bench.servers import EmberdServer, LlamaServer, Resident, Server, shown

PROMPT = 16  # tokens
_KEEP_ALIVE = 1.0  # seconds after which a model is unloaded: llama-server's least

Serve = Callable[[bool], Server]
"""Starts a server; True: one that unloads its model when it is idle."""


@dataclass
class Starts:
    """Samples in seconds; `prompt`: tokens."""

    exec: list[float] = field(default_factory=list)
    listening: list[float] = field(default_factory=list)
    unloaded: list[float] = field(default_factory=list)
    loaded: list[float] = field(default_factory=list)
    idle: Resident = field(default_factory=Resident)
    prompt: int = 0

    def rows(self) -> dict[str, str]:
        """Figures as text: the median, in brackets the least and the greatest."""
        wake = statistics.median(self.unloaded) - statistics.median(self.loaded)
        return {
            "exec -> listening, ms": shown(self.listening),
            "exec -> first token, ms": shown(self.exec),
            "request -> first token, model unloaded, ms": shown(self.unloaded),
            "request -> first token, model loaded, ms": shown(self.loaded),
            "wake: the difference of these medians, ms": f"{1e3 * wake:.1f}",
            "tokens of the prompt": str(self.prompt),
            "resident while unloaded, MB": str(self.idle),
        }


def phases(artifact: Path, samples: int) -> dict[str, str]:
    """When a starting daemon did what, in the order of time: figures as in Starts.rows."""
    fresh = _texts(serve_emberd(artifact))
    found: dict[str, list[float]] = {}
    for _ in range(samples):
        with EmberdServer(artifact) as server:
            server.connect()
            server.ask(fresh())
            for name, seconds in server.milestones().items():
                found.setdefault(name, []).append(seconds)
    in_time = sorted(found, key=lambda name: statistics.median(found[name]))
    return {f"exec -> {name.replace('_', ' ')}, ms": shown(found[name]) for name in in_time}


def measure(sides: dict[str, Serve], samples: int) -> dict[str, Starts]:
    """Measures servers of one model, in turns."""
    fresh = _texts(next(iter(sides.values())))
    found = {name: Starts() for name in sides}
    for _ in range(samples):
        for name, serve in sides.items():
            with serve(False) as server:
                found[name].listening.append(server.connect())
                _, found[name].prompt = server.ask(fresh())
                found[name].exec.append(time.perf_counter() - server.started)
    with ExitStack() as stack:
        servers = {name: stack.enter_context(serve(True)) for name, serve in sides.items()}
        for server in servers.values():
            server.connect()
            server.ask(fresh())
        for _ in range(samples):
            for server in servers.values():
                server.wait_until_unloaded()
            for name, server in servers.items():
                found[name].unloaded.append(server.ask(fresh())[0])
                found[name].loaded.append(server.ask(fresh())[0])
        for name, server in servers.items():
            server.wait_until_unloaded()
            time.sleep(_KEEP_ALIVE / 4)
            found[name].idle = server.resident()
    return found


def _texts(serve: Serve) -> Callable[[], str]:
    """Makes messages that no cache has seen, of which a prompt has about PROMPT tokens."""
    with serve(False) as server:
        server.connect()
        lengths = {words: server.ask("a" + " a" * words)[1] for words in range(1, PROMPT)}
    words = min(lengths, key=lambda count: abs(lengths[count] - PROMPT))
    letters = cycle("bcdefghijklmnopqrstuvwxyz")  # more than there are slots to remember them
    return lambda: next(letters) + " a" * words


def serve_emberd(artifact: Path) -> Serve:
    """With settings as they are by default."""
    return lambda unloads: EmberdServer(artifact, keep_alive=_KEEP_ALIVE if unloads else -1)


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.starts", description=__doc__.splitlines()[0])
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--phases", action="store_true", help="only tell what a start consists of")
    parser.add_argument(
        "--peer", type=Path, nargs=2, metavar=("LLAMA_SERVER", "GGUF"), help="the other program"
    )
    parser.add_argument(
        "--cold", type=Path, metavar="PLAIN", help="only cold wakes, beside an artifact of no map"
    )
    parser.add_argument("--share", type=int, default=25, help="percent of the experts in memory")
    parser.add_argument("--commands", type=Path, help="what --cold asks; else it draws token ids")
    parser.add_argument("--topics", type=int, default=1, help="of the ids that are drawn")
    arguments = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed emberd has its bytecode
    if arguments.phases:
        for name, figure in phases(arguments.artifact, arguments.samples).items():
            print(f"| {name} | {figure} |")
        return
    if arguments.cold:
        artifacts = {"with the map": arguments.artifact, "without": arguments.cold}
        questions = (
            cold.commands(arguments.commands)
            if arguments.commands
            else cold.drawn(arguments.artifact, arguments.topics)
        )
        _print(cold.measure(artifacts, arguments.share, questions, arguments.samples))
        return
    sides = {"emberd": serve_emberd(arguments.artifact)}
    if arguments.peer:
        sides["llama-server"] = lambda unloads: LlamaServer(*arguments.peer, unloads)
    _print(measure(sides, arguments.samples))


def _print(found: Mapping[str, Starts] | Mapping[str, cold.Wakes]) -> None:
    """A table of a column for each."""
    print("| |", " | ".join(found), "|")
    print("|---" * (1 + len(found)) + "|")
    for name in next(iter(found.values())).rows():
        print(f"| {name} |", " | ".join(column.rows()[name] for column in found.values()), "|")


if __name__ == "__main__":
    main()
