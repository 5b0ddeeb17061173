"""Cold wakes, on the embedded model."""

from __future__ import annotations

import json
import shutil
from itertools import islice
from pathlib import Path

import pytest
from emberd.daemon.artifact import Artifact

from bench import cold


def test_artifacts_are_woken_in_turns(demo_artifact: Path, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(demo_artifact, tmp_path / "copied"))
    artifacts = {"with": demo_artifact, "without": copied}
    try:
        cold.read_directly([demo_artifact / "weights.bin"], 1)
    except OSError:
        pytest.skip("the file system has no direct reads")
    found = cold.measure(artifacts, 50, cold.drawn(demo_artifact, topics=4), samples=2)
    assert list(found) == ["with", "without"]
    for wakes in found.values():
        assert len(wakes.cold) == len(wakes.loaded) == len(wakes.read) == len(wakes.disk) == 2
        assert min(wakes.cold + wakes.loaded + wakes.disk) > 0
        assert min(wakes.read) > 0
        assert len(wakes.rows()) == 5


def test_prompts_are_of_topics_in_turns(demo_artifact: Path) -> None:
    vocabulary = Artifact.open(demo_artifact).model.vocab_size
    for topic, question in enumerate(islice(cold.drawn(demo_artifact, topics=3), 3)):
        assert len(question["prompt"]) == cold.PROMPT
        assert all(token < vocabulary and token % 3 == topic for token in question["prompt"])


def test_commands_are_asked_as_they_are_profiled(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "x"}]
    lines = [{"class": "a", "messages": chat}, {"class": "b", "prompt": "y", "language": "en"}]
    path = tmp_path / "commands.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    assert cold.commands(path) == [{"messages": chat}, {"prompt": "y"}]
