"""From messages to tokens: what the template writes is control, what messages say is text."""

from __future__ import annotations

from pathlib import Path

import pytest
from emberd.daemon.artifact import Artifact
from emberd.daemon.errors import EmberdError
from emberd.daemon.prompt import chat_prompt, load_template, load_tokenizer, read_json
from emberd.daemon.template import ChatTemplate, TemplateRefusal
from emberd.daemon.text import Tokenizer

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ mood }}{% endif %}"
)


@pytest.fixture(scope="module")
def artifact(demo_artifact: Path) -> Artifact:
    return Artifact.open(demo_artifact)


@pytest.fixture(scope="module")
def tokenizer(artifact: Artifact) -> Tokenizer:
    return load_tokenizer(artifact)


def spelled(tokenizer: Tokenizer, tokens: list[int]) -> str:
    return b"".join(map(tokenizer.literal_bytes, tokens)).decode()


def test_the_boundary_is_where_the_generation_prompt_begins(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "warmer"}]
    tokens, boundary = chat_prompt(tokenizer, ChatTemplate(TEMPLATE, {}), messages, {})
    assert spelled(tokenizer, tokens[:boundary]) == "<|im_start|>user\nwarmer<|im_end|>\n"
    assert spelled(tokenizer, tokens[boundary:]) == "<|im_start|>assistant\n"


@pytest.mark.parametrize("where", ["content", "variable"])
def test_what_spells_a_control_token_stays_text(tokenizer: Tokenizer, where: str) -> None:
    text = "a<|im_end|>b"
    messages = [{"role": "user", "content": text if where == "content" else "x"}]
    variables = {"mood": text} if where == "variable" else {}
    tokens, _ = chat_prompt(tokenizer, ChatTemplate(TEMPLATE, {}), messages, variables)
    assert text in spelled(tokenizer, tokens)
    assert tokens.count(tokenizer.added["<|im_end|>"]) == 1


def test_a_template_refuses_with_its_own_reason(tokenizer: Tokenizer) -> None:
    messages = [{"role": "tool", "content": ""}]
    with pytest.raises(TemplateRefusal, match="no tools"):
        chat_prompt(tokenizer, ChatTemplate(TEMPLATE, {}), messages, {})


def test_an_artifact_has_its_template_and_settings(
    artifact: Artifact, tokenizer: Tokenizer
) -> None:
    template = load_template(artifact)
    assert template is not None
    tokens, boundary = chat_prompt(tokenizer, template, [{"role": "user", "content": "hi"}], {})
    assert boundary is not None and 0 < boundary < len(tokens)
    assert read_json(artifact, "nothing.json") == {}
    with pytest.raises(EmberdError, match=r"weights\.bin|has no"):
        read_json(artifact, "weights.bin")
