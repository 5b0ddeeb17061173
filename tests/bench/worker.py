"""A side under measurement, in a process of its own that does what it is told on standard input.

A line in is a JSON list [method, arguments]; a line out is {"seconds", "cpu_seconds", "peak_bytes"}
or {"error"}. A process that takes longer than it may is killed: llama.cpp can fall to one token a
second when it loses a core.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from bench.memory_limit import MemoryLimit

SIDES = ("emberd", "peer")
_TESTS = Path(__file__).parents[1]


class Side(Protocol):
    """What is measured. Every method returns the seconds that its essential part took."""

    def start(
        self,
        path: str,
        threads: int,
        context: int,
        streams: int,
        prompt: int,
        expert_budget: int | None = None,
    ) -> float:
        """From nothing loaded to the first greedy token after a prompt of `prompt` tokens.

        `expert_budget`: bytes of memory for experts; None: as many as there are.
        """

    def turn_to(self, topic: int, topics: int) -> float:
        """From now on, be fed ids with the remainder `topic` by `topics`."""

    def clear(self) -> float:
        """Forget all tokens."""

    def prefill(self, count: int) -> float:
        """Append `count` tokens to the first stream; logits of the last one."""

    def decode(self, count: int) -> float:
        """Append `count` tokens to every stream, one at a time, each with its logits."""

    def fill(self, count: int) -> float:
        """Bring the first stream to `count` tokens."""


@dataclass(frozen=True)
class Reply:
    """`peak_bytes`: most memory that was resident since the interpreter was ready."""

    seconds: float
    cpu_seconds: float
    peak_bytes: int


class WorkerError(Exception):
    """The worker failed, died or took too long; it is gone."""


class Worker:
    """A worker process, seen from the process that measures. Close it when done."""

    def __init__(self, side: str, limit: MemoryLimit | None = None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.worker", side],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(_TESTS), *sys.path[1:]])},
        )
        if limit is not None:
            limit.add(self._process.pid)
        self.side = side

    def call(self, method: str, limit_seconds: float, **arguments: Any) -> Reply:
        """Raises WorkerError."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps([method, arguments]).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure("has died") from None
        ready, _, _ = select.select([self._process.stdout], [], [], limit_seconds)
        if not ready:
            raise self._failure(f"took more than {limit_seconds:.0f} s for {method} {arguments}")
        line = self._process.stdout.readline()
        if not line:
            raise self._failure(f"has died in {method} {arguments}")
        reply = json.loads(line)
        if "error" in reply:
            raise self._failure(f"failed in {method} {arguments}: {reply['error']}")
        return Reply(**reply)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _failure(self, what: str) -> WorkerError:
        self.close()
        return WorkerError(f"{self.side} {what}")


def peak_resident() -> int:
    """The most bytes of memory that were resident in this process at a time."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("the system does not tell the peak of resident memory")


def _serve(side: Side, commands: Mapping[str, Any] | Any) -> None:
    before = peak_resident()
    for line in commands:
        method, arguments = json.loads(line)
        cpu = time.process_time()
        try:
            seconds = getattr(side, method)(**arguments)
        except Exception as error:  # whatever it is, it belongs to the one who asked
            print(json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)
            return
        reply = {
            "seconds": seconds,
            "cpu_seconds": time.process_time() - cpu,
            "peak_bytes": peak_resident() - before,
        }
        print(json.dumps(reply), flush=True)


def _side(name: str) -> Side:
    """Only the side that is asked for is imported: the other would count in its memory."""
    if name == "emberd":
        from bench.emberd_side import EmberdSide

        return EmberdSide()
    from bench.peer_side import PeerSide

    return PeerSide()


if __name__ == "__main__":
    _serve(_side(sys.argv[1]), sys.stdin)
