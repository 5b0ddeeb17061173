"""Wakes with nothing of the model in the page cache, beside what the disk alone would take.

With memory for a part of the experts, the daemon reads weights and the experts that routers choose
before there is a first token; with an activation map, experts that are likely to be chosen as well.
The disk alone: the same number of bytes, read past the page cache in large pieces, one after the
other, with as many threads as the daemon reads with.
"""

from __future__ import annotations

import json
import mmap
import os
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

from emberd.daemon.artifact import EXPERTS, WEIGHTS, Artifact
from emberd.daemon.config import Config
from emberd.daemon.memory import address

from bench.memory_limit import find_memory, forget
from bench.servers import EmberdServer, shown
from bench.tokens import Tokens

PROMPT = 16  # tokens of a prompt that is drawn
KEEP_ALIVE = 1.0  # seconds after which a model is unloaded
_PIECE = 2 << 20  # bytes of a read

Question = dict[str, Any]
"""What is asked: {"messages": ...} of a chat, or {"prompt": ...}."""


@dataclass
class Wakes:
    """Samples in seconds, and the bytes that were read for each first token of `cold`."""

    cold: list[float] = field(default_factory=list)
    loaded: list[float] = field(default_factory=list)
    read: list[int] = field(default_factory=list)
    disk: list[float] = field(default_factory=list)

    def rows(self) -> dict[str, str]:
        """Figures as text: the median, in brackets the least and the greatest."""
        wake = statistics.median(self.cold) - statistics.median(self.loaded)
        return {
            "request -> first token, model unloaded, nothing cached, ms": shown(self.cold),
            "request -> first token, model loaded, ms": shown(self.loaded),
            "wake: the difference of these medians, ms": f"{1e3 * wake:.1f}",
            "the disk alone, for the bytes that were read, ms": shown(self.disk),
            "bytes that were read, MB": f"{statistics.median(self.read) / 1e6:.1f}",
        }


def measure(
    artifacts: dict[str, Path], share: int, questions: Iterable[Question], samples: int
) -> dict[str, Wakes]:
    """Measures artifacts of one model in turns, with memory for `share` percent of its experts.

    Each sample asks a question of its own, and takes another one for the figure of a loaded model:
    no cache of prompts answers the same one twice.
    """
    asked = cycle(questions)
    found = {name: Wakes() for name in artifacts}
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(_serve(artifact, share))
            for name, artifact in artifacts.items()
        }
        for server in servers.values():
            server.connect()
            server.ask_for(next(asked))
        for _ in range(samples):
            question, other = next(asked), next(asked)
            for name, server in servers.items():
                _sample(server, artifacts[name], found[name], question, other)
    return found


def _serve(artifact: Path, share: int) -> EmberdServer:
    """With a single slot: a question takes the place of the one before it."""
    budget = (artifact / EXPERTS).stat().st_size * share // 100
    return EmberdServer(artifact, keep_alive=KEEP_ALIVE, expert_budget=budget, slots=1)


def _sample(
    server: EmberdServer, artifact: Path, wakes: Wakes, question: Question, other: Question
) -> None:
    files = [artifact / name for name in (WEIGHTS, EXPERTS)]
    server.wait_until_unloaded()
    forget(artifact)
    find_memory(sum(file.stat().st_size for file in files))
    before = server.bytes_read()
    wakes.cold.append(server.ask_for(question)[0])
    wakes.read.append(server.bytes_read() - before)
    server.ask_for(other)
    wakes.loaded.append(server.ask_for(question)[0])
    server.wait_until_unloaded()  # and no longer reads anything
    wakes.disk.append(read_directly(files, wakes.read[-1]))


def read_directly(files: Sequence[Path], size: int) -> float:
    """Seconds that the disk takes for the first `size` bytes of the files, from the first file on.

    Raises OSError where the file system has no direct reads.
    """
    pieces: list[tuple[int, int]] = []  # descriptor, offset
    count = Config().reader_threads
    with ExitStack() as stack:
        for file in files:
            descriptor = os.open(file, os.O_RDONLY | os.O_DIRECT)
            stack.callback(os.close, descriptor)
            taken = min(size, os.fstat(descriptor).st_size)
            size -= taken
            pieces += [(descriptor, offset) for offset in range(0, taken, _PIECE)]
        buffer = stack.enter_context(memoryview(_huge_pages((count + 1) * _PIECE)))
        begin = -address(buffer.obj) % _PIECE

        def read(number: int) -> None:
            first = begin + number * _PIECE
            for descriptor, offset in pieces[number::count]:
                os.preadv(descriptor, [buffer[first : first + _PIECE]], offset)

        threads = stack.enter_context(ThreadPoolExecutor(count))
        start = time.perf_counter()
        list(threads.map(read, range(count)))
        return time.perf_counter() - start


def _huge_pages(size: int) -> mmap.mmap:
    """Memory like that which the daemon reads into, touched already: a disk takes longer for pieces
    that lie on many pages."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    memory.write(bytes(size))
    return memory


def commands(path: Path) -> list[Question]:
    """What is asked in lines of JSON, as emberc profile takes them."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [{key: line[key]} for line in lines for key in ("messages", "prompt") if key in line]


def drawn(artifact: Path, topics: int) -> Iterator[Question]:
    """Prompts of random token ids, each of one topic (see Tokens.turn_to)."""
    tokens = Tokens(Artifact.open(artifact).model.vocab_size)
    for topic in cycle(range(topics)):
        tokens.turn_to(topic, topics)
        yield {"prompt": tokens.take(PROMPT)}
