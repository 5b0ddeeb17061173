"""Command files become the tokens that the daemon would read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from emberd.compile.residency.commands import Command, CommandReader
from emberd.daemon.artifact import Artifact
from emberd.daemon.errors import EmberdError
from emberd.daemon.prompt import load_tokenizer

USER = {"role": "user", "content": "Set the driver side to 21 <|im_end|> degrees"}
ANSWER = {"role": "assistant", "content": "Done."}


@pytest.fixture(scope="module")
def artifact(demo_artifact: Path) -> Artifact:
    return Artifact.open(demo_artifact)


def read(artifact: Artifact, folder: Path, *lines: Any, longest: int = 4096) -> list[Command]:
    path = folder / "commands.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts), encoding="utf-8")
    return list(CommandReader(artifact, longest).read(path))


def test_messages_go_through_the_template_and_stay_text(artifact: Artifact, tmp_path: Path) -> None:
    (command,) = read(artifact, tmp_path, {"class": "climate", "messages": [USER]})
    tokenizer = load_tokenizer(artifact)
    text = b"".join(map(tokenizer.literal_bytes, command.tokens)).decode()
    turn = f"<|im_start|>user\n{USER['content']}<|im_end|>\n<|im_start|>assistant\n"
    assert text == turn + "<think>\n\n</think>\n\n"
    control = tokenizer.added["<|im_end|>"]
    assert list(command.tokens).count(control) == 1
    assert (command.command_class, command.complete) == ("climate", False)


def test_messages_with_their_answer_are_complete(artifact: Artifact, tmp_path: Path) -> None:
    (command,) = read(artifact, tmp_path, {"class": "climate", "messages": [USER, ANSWER]})
    text = b"".join(map(load_tokenizer(artifact).literal_bytes, command.tokens)).decode()
    assert command.complete and text.endswith("<|im_start|>assistant\nDone.<|im_end|>\n")


def test_prompts_stand_as_they_are_and_other_members_are_not_read(
    artifact: Artifact, tmp_path: Path
) -> None:
    line = {"class": "raw", "prompt": "<|im_start|>user\nhi", "language": "en"}
    first, second = read(artifact, tmp_path, line, "", {"class": "b", "prompt": "x"}, "")
    assert list(first.tokens) == load_tokenizer(artifact).encode_with_control(line["prompt"])
    assert not first.complete and second.command_class == "b"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        (r'{"class": "a", "prompt": "x \ud800"}', "a lone surrogate"),
        ("[1]", 'expected {"class"'),
        ({"class": "a"}, 'expected {"class"'),
        ({"class": "a", "prompt": "x", "messages": [USER]}, 'expected {"class"'),
        ({"prompt": "x"}, "class: expected a name"),
        ({"class": "", "prompt": "x"}, "class: expected a name"),
        ({"class": "a\n", "prompt": "x"}, "cannot be shown"),
        ({"class": "a", "prompt": 5}, "prompt: expected a string"),
        ({"class": "a", "prompt": ""}, "0 tokens"),
        ({"class": "a", "prompt": "word " * 50}, "tokens: expected 1 to 40"),
        ({"class": "a", "messages": []}, "messages: expected a list"),
        ({"class": "a", "messages": [USER, {"role": "user"}]}, "messages[1]: expected"),
        ({"class": "a", "messages": [{**USER, "role": "owner"}]}, "messages[0]: expected"),
        ({"class": "a", "messages": [{"role": "user", "content": 1}]}, "messages[0]: expected"),
        ({"class": "a", "messages": [ANSWER, USER, {**USER, "role": "system"}]}, "System message"),
    ],
)
def test_a_bad_line_is_named(artifact: Artifact, tmp_path: Path, line: Any, message: str) -> None:
    with pytest.raises(EmberdError) as raised:
        read(artifact, tmp_path, {"class": "a", "prompt": "fine"}, line, longest=40)
    assert "commands.jsonl: line 2: " in str(raised.value) and message in str(raised.value)


def test_a_file_that_is_not_there_is_named(artifact: Artifact, tmp_path: Path) -> None:
    with pytest.raises(EmberdError, match="nowhere: cannot be read"):
        list(CommandReader(artifact, 10).read(tmp_path / "nowhere"))
