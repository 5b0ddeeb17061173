"""The embedded model through the daemon at q4: held-out commands answered with the right action."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

DEMO = Path(__file__).parents[2] / "firmware_assets" / "demo"
REQUIRED = 0.95


@pytest.fixture
def daemon(demo_artifact: Path) -> Iterator[str]:
    """The address of `emberd serve` on the embedded model."""
    command = [sys.executable, "-m", "emberd.daemon.cli", "serve", str(demo_artifact)]
    process = subprocess.Popen([*command, "--port", "0"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().split()[-1]
    finally:
        process.terminate()
        assert process.wait(30) == 0
        process.stdout.close()


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
