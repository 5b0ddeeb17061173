"""The servers under measurement: processes that answer a chat over HTTP, and their one client."""

from __future__ import annotations

import http.client
import json
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import Any, Self

_LIMIT_SECONDS = 60.0
_POLL_SECONDS = 0.001


@dataclass(frozen=True)
class Resident:
    """Resident memory of a process, in bytes: its own (stacks, heap), and pages of files."""

    anonymous: int = 0
    files: int = 0

    def __str__(self) -> str:
        own, files = self.anonymous / 1e6, self.files / 1e6
        return f"{own + files:.1f} ({own:.1f} anonymous, {files:.1f} of files)"


def shown(seconds: Sequence[float]) -> str:
    """Milliseconds: the median, in brackets the least and the greatest."""
    low, middle, high = min(seconds), statistics.median(seconds), max(seconds)
    return f"{1e3 * middle:.1f} ({1e3 * low:.1f} to {1e3 * high:.1f})"


class Server(ABC):
    """A server process; it need not listen yet."""

    def __init__(self, command: Sequence[str], port: int) -> None:
        self._http = http.client.HTTPConnection("127.0.0.1", port, timeout=_LIMIT_SECONDS)
        self.started = time.perf_counter()
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    @abstractmethod
    def is_loaded(self) -> bool:
        """Whether the model is in memory."""

    def connect(self) -> float:
        """Seconds from the start to the first connection."""
        while True:
            try:
                self._http.connect()
            except ConnectionRefusedError:
                if self.process.poll() is not None:
                    raise RuntimeError(f"{self.process.args[0]} has died") from None
                time.sleep(_POLL_SECONDS)
            else:
                return time.perf_counter() - self.started

    def ask(self, text: str) -> tuple[float, int]:
        """Seconds to the first token of an answer, and the tokens of the prompt."""
        return self.ask_for({"messages": [{"role": "user", "content": text}]})

    def ask_for(self, question: Mapping[str, Any]) -> tuple[float, int]:
        """As `ask`, of a chat's {"messages": ...} or of {"prompt": text or token ids}."""
        path, body = "/v1/completions", {**question, "max_tokens": 1}
        if "messages" in question:
            path = "/v1/chat/completions"
            body["chat_template_kwargs"] = {"enable_thinking": False}
        start = time.perf_counter()
        while True:
            status, answer = self._call("POST", path, body)
            if status == HTTPStatus.OK:
                return time.perf_counter() - start, answer["usage"]["prompt_tokens"]
            if status != HTTPStatus.SERVICE_UNAVAILABLE:  # llama-server's while it loads
                raise RuntimeError(f"not answered: {answer}")
            time.sleep(_POLL_SECONDS)

    def wait_until_unloaded(self) -> None:
        while self.is_loaded():
            time.sleep(10 * _POLL_SECONDS)

    def resident(self) -> Resident:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        sizes = dict(line.split(":") for line in status.splitlines())
        own, *mapped = (
            int(sizes[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile", "RssShmem")
        )
        return Resident(own, sum(mapped))

    def bytes_read(self) -> int:
        """What the process has had read from disks so far."""
        counters = Path(f"/proc/{self.process.pid}/io").read_text()
        return int(re.search(r"^read_bytes: (\d+)$", counters, re.MULTILINE)[1])

    def close(self) -> None:
        self._http.close()
        self.process.terminate()
        self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _call(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        data = None if body is None else json.dumps(body)
        self._http.request(method, path, data, {"Content-Type": "application/json"})
        response = self._http.getresponse()
        return response.status, json.loads(response.read())


class EmberdServer(Server):
    """`emberd serve` of an artifact."""

    def __init__(self, artifact: Path, **settings: Any) -> None:
        self._file = tempfile.NamedTemporaryFile("w", suffix=".yaml")  # noqa: SIM115 (see close)
        port = _free_port()
        json.dump({"port": port, **settings}, self._file)  # JSON is YAML
        self._file.flush()
        command = ("-m", "emberd.daemon.cli", "serve", str(artifact), "--config", self._file.name)
        super().__init__([sys.executable, *command], port)

    def is_loaded(self) -> bool:
        return bool(self._call("GET", "/health")[1]["model_loaded"])

    def milestones(self) -> dict[str, float]:
        """Seconds from the start until the daemon first did what it names, as it says."""
        self._http.request("GET", "/metrics")
        text = self._http.getresponse().read().decode()
        found = re.findall(r'^emberd_start_seconds{milestone="(\w+)"} (\S+)$', text, re.MULTILINE)
        return {name: float(seconds) for name, seconds in found}

    def close(self) -> None:
        super().close()
        self._file.close()


class LlamaServer(Server):
    """llama.cpp's llama-server of a GGUF file, as it is by default.

    `sleep`: whether it unloads the model after a second without a request, its least.
    """

    def __init__(self, program: Path, model: Path, sleep: bool) -> None:
        port = _free_port()
        settings = {"model": model, "port": port, "ctx-size": 4096}
        if sleep:
            settings["sleep-idle-seconds"] = 1
        options = [text for name, value in settings.items() for text in (f"--{name}", str(value))]
        super().__init__([str(program), "--offline", "--log-disable", *options], port)

    def is_loaded(self) -> bool:
        return not self._call("GET", "/props")[1]["is_sleeping"]


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port
