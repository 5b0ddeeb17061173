"""The embedded model through the daemon at q4: held-out commands answered with the right action."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from emberd.compile.build import build

DEMO = Path(__file__).parents[2] / "firmware_assets" / "demo"
REQUIRED = 0.95


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of `emberd serve` on the embedded model, built at q4 for this machine."""
    artifact = tmp_path_factory.mktemp("demo") / "artifact"
    build(DEMO / "model", artifact, "host", "q4")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    start = "import sys; from emberd.daemon.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", start, "serve", str(artifact), "--port", str(port)]
    process = subprocess.Popen(command)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(300):
            try:
                urllib.request.urlopen(f"{address}/health").close()
                break
            except OSError:
                assert process.poll() is None, "the daemon ended"
                time.sleep(0.1)
        yield address
    finally:
        process.terminate()
        assert process.wait(30) == 0


def _answer(address: str, messages: list[dict[str, str]]) -> str:
    body = json.dumps({"messages": messages, "temperature": 0, "max_tokens": 200}).encode()
    request = urllib.request.Request(
        f"{address}/v1/chat/completions", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:
        content: str = json.load(response)["choices"][0]["message"]["content"]
    return content


def _action(answer: str) -> Any:
    try:
        return json.loads(answer.strip().splitlines()[-1])
    except (ValueError, IndexError):
        return None


def test_held_out_actions_are_exactly_right(daemon: str) -> None:
    lines = (DEMO / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    dialogues = [json.loads(line) for line in lines]
    wrong = [d for d in dialogues if _action(_answer(daemon, d["messages"])) != d["action"]]
    right = 1 - len(wrong) / len(dialogues)
    print(f"\nexactly right: {len(dialogues) - len(wrong)} of {len(dialogues)}")
    assert right >= REQUIRED, [d["messages"][-1]["content"] for d in wrong]
