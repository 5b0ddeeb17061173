"""How long `emberd serve` takes to its first token, and what it weighs: `python -m bench.starts`.

Every figure is taken from outside, over HTTP, of a real process, with a chat of about 16 tokens
that no cache has seen. The page cache is as it is found: run it twice for warm figures.

exec       from starting the process to the first token of a request that is sent at once
listening  from starting the process to the first connection that is taken
wake       from request to first token of an unloaded model, minus the same of a loaded one
idle       resident memory of the process while its model is unloaded
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

PROMPT = 16  # tokens
_LIMIT_SECONDS = 60.0
_KEEP_ALIVE = 0.05  # seconds after which the model is unloaded


@dataclass(frozen=True)
class Resident:
    """Resident memory of a process, in bytes: its own (stacks, heap), and pages of files."""

    anonymous: int = 0
    files: int = 0

    def __str__(self) -> str:
        own, files = self.anonymous / 1e6, self.files / 1e6
        return f"{own + files:.1f} ({own:.1f} anonymous, {files:.1f} of files)"


class Server:
    """An `emberd serve` process and its one client."""

    def __init__(self, artifact: Path, port: int, **settings: Any) -> None:
        self._file = tempfile.NamedTemporaryFile("w", suffix=".yaml")  # noqa: SIM115 (see close)
        json.dump({"port": port, **settings}, self._file)  # JSON is YAML
        self._file.flush()
        command = ("-m", "emberd.daemon.cli", "serve", str(artifact), "--config", self._file.name)
        self.started = time.perf_counter()
        self.process = subprocess.Popen([sys.executable, *command], stdout=subprocess.DEVNULL)
        self._port = port
        self._http = http.client.HTTPConnection("127.0.0.1", port, timeout=_LIMIT_SECONDS)

    def connect(self) -> float:
        """Seconds from the start to the first connection."""
        while True:
            try:
                self._http.connect()
            except ConnectionRefusedError:
                if self.process.poll() is not None:
                    raise RuntimeError("emberd has died") from None
                time.sleep(0.001)
            else:
                return time.perf_counter() - self.started

    def ask(self, text: str) -> tuple[float, int]:
        """Seconds to the first token of an answer, and the tokens of the prompt."""
        messages = [{"role": "user", "content": text}]
        start = time.perf_counter()
        body = self._call("POST", "/v1/chat/completions", {"messages": messages, "max_tokens": 1})
        return time.perf_counter() - start, body["usage"]["prompt_tokens"]

    def wait_until_unloaded(self) -> None:
        while self._call("GET", "/health", None)["model_loaded"]:
            time.sleep(_KEEP_ALIVE / 4)

    def resident(self) -> Resident:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        sizes = dict(line.split(":") for line in status.splitlines())
        own, *mapped = (
            int(sizes[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile", "RssShmem")
        )
        return Resident(own, sum(mapped))

    def close(self) -> None:
        self._http.close()
        self.process.terminate()
        self.process.wait()
        self._file.close()

    def _call(self, method: str, path: str, body: Any) -> Any:
        data = None if body is None else json.dumps(body)
        self._http.request(method, path, data, {"Content-Type": "application/json"})
        response = self._http.getresponse()
        answer = json.loads(response.read())
        if response.status != 200:
            raise RuntimeError(f"{path}: {answer}")
        return answer


@contextmanager
def serving(artifact: Path, **settings: Any) -> Iterator[Server]:
    """A daemon on a free port; it need not listen yet."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = Server(artifact, port, **settings)
    try:
        yield server
    finally:
        server.close()


@dataclass
class Starts:
    """Samples in seconds; `prompt`: tokens."""

    exec: list[float] = field(default_factory=list)
    listening: list[float] = field(default_factory=list)
    unloaded: list[float] = field(default_factory=list)
    loaded: list[float] = field(default_factory=list)
    idle: Resident = Resident()
    prompt: int = 0

    def rows(self) -> list[tuple[str, str]]:
        """Figures as text: the median, in brackets the least and the greatest."""
        wake = statistics.median(self.unloaded) - statistics.median(self.loaded)
        return [
            ("exec -> listening, ms", _shown(self.listening)),
            (f"exec -> first token of {self.prompt}, ms", _shown(self.exec)),
            ("request -> first token, model unloaded, ms", _shown(self.unloaded)),
            ("request -> first token, model loaded, ms", _shown(self.loaded)),
            ("wake: the difference of these medians, ms", f"{1e3 * wake:.1f}"),
            ("resident while unloaded, MB", str(self.idle)),
        ]


def measure(artifact: Path, samples: int) -> Starts:
    """Measures a served artifact."""
    starts = Starts()
    fresh, starts.prompt = _texts(artifact)
    for _ in range(samples):
        with serving(artifact) as server:
            starts.listening.append(server.connect())
            server.ask(fresh())
            starts.exec.append(time.perf_counter() - server.started)
    with serving(artifact, keep_alive=_KEEP_ALIVE) as server:
        server.connect()
        for _ in range(samples):
            server.wait_until_unloaded()
            starts.unloaded.append(server.ask(fresh())[0])
            starts.loaded.append(server.ask(fresh())[0])
        server.wait_until_unloaded()
        time.sleep(4 * _KEEP_ALIVE)
        starts.idle = server.resident()
    return starts


def _texts(artifact: Path) -> tuple[Callable[[], str], int]:
    """Makes messages that no cache has seen, of which a prompt has about PROMPT tokens."""
    with serving(artifact) as server:
        server.connect()
        lengths = {words: server.ask("a" + " a" * words)[1] for words in range(1, PROMPT)}
    words = min(lengths, key=lambda count: abs(lengths[count] - PROMPT))
    letters = cycle("bcdefghijklmnopqrstuvwxyz")  # more than there are slots to remember them
    return lambda: next(letters) + " a" * words, lengths[words]


def _shown(seconds: list[float]) -> str:
    low, middle, high = min(seconds), statistics.median(seconds), max(seconds)
    return f"{1e3 * middle:.1f} ({1e3 * low:.1f} to {1e3 * high:.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.starts", description=__doc__.splitlines()[0])
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--samples", type=int, default=20)
    arguments = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed emberd has its bytecode
    for name, text in measure(arguments.artifact, arguments.samples).rows():
        print(f"| {name} | {text} |")


if __name__ == "__main__":
    main()
