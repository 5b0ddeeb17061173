"""The committed demo checkpoint: size, shapes the kernels accept, tokenizer and chat template."""

from __future__ import annotations

import json
import random
from typing import Any

import jinja2
import pytest
from grammar import make_dialogue
from tokenizers import Tokenizer
from write_dialogues import HERE as DEMO

MODEL = DEMO / "model"
pytestmark = pytest.mark.skipif(not MODEL.exists(), reason="no committed model")
THINK_NOTHING = "<think>\n\n</think>\n\n"


def read_json(name: str) -> dict[str, Any]:
    settings: dict[str, Any] = json.loads((MODEL / name).read_text(encoding="utf-8"))
    return settings


def refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def render(messages: list[dict[str, str]], **options: bool) -> str:
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = refuse
    template = environment.from_string(read_json("tokenizer_config.json")["chat_template"])
    return template.render(messages=messages, **options)


def test_the_folder_is_small() -> None:
    assert sum(path.stat().st_size for path in MODEL.iterdir()) <= 12_000_000


def test_every_dimension_suits_the_kernels() -> None:
    config = read_json("config.json")
    attention = config["num_attention_heads"] * config["head_dim"]
    values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    inner = (config["moe_intermediate_size"], config["shared_expert_intermediate_size"])
    for size in (config["hidden_size"], config["vocab_size"], attention, values, *inner):
        assert size % 64 == 0
    assert config["model_type"] == "qwen3_5_moe_text"
    assert config["layer_types"].count("linear_attention") == 3 * config["layer_types"].count(
        "full_attention"
    )


def test_tokenizer_round_trips_the_grammar_and_unseen_text() -> None:
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    rng = random.Random(9)
    texts = [m["content"] for _ in range(500) for m in make_dialogue(rng, "heldout").messages]
    for text in [*texts, "naïve 😀 Ωμέγα\n\n\tдом 1234", "<|im_start|>user\n<think>"]:
        ids = tokenizer.encode(text).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
        assert max(ids) < read_json("config.json")["vocab_size"]


def test_digits_are_split_and_stop_tokens_are_named() -> None:
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    assert len(tokenizer.encode("1234").ids) == 4
    stops = [tokenizer.token_to_id(t) for t in ("<|im_end|>", "<|endoftext|>")]
    generation = read_json("generation_config.json")
    assert generation["eos_token_id"] == stops
    assert not generation.get("do_sample", False)


def test_template_file_and_setting_agree() -> None:
    written = (MODEL / "chat_template.jinja").read_text(encoding="utf-8")
    assert written == read_json("tokenizer_config.json")["chat_template"]
    assert written == (DEMO / "chat_template.jinja").read_text(encoding="utf-8")


def test_generation_prompt_closes_or_opens_the_thinking() -> None:
    messages = [{"role": "user", "content": "warmer"}]
    head = "<|im_start|>user\nwarmer<|im_end|>\n"
    opening = "<|im_start|>assistant\n"
    assert render(messages) == head
    assert render(messages, add_generation_prompt=True) == head + opening + THINK_NOTHING
    thinking = render(messages, add_generation_prompt=True, enable_thinking=True)
    assert thinking == head + opening + "<think>\n"


def test_old_thinking_is_dropped() -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nb"},
        {"role": "user", "content": "c"},
    ]
    assert "<|im_start|>assistant\nb<|im_end|>" in render(messages)
    assert "hm" not in render(messages)


def test_template_refuses_what_it_must() -> None:
    system = {"role": "system", "content": "s"}
    user = {"role": "user", "content": "u"}
    assert render([system, user]).startswith("<|im_start|>system\ns<|im_end|>\n")
    with pytest.raises(jinja2.TemplateError, match="System message must be at the beginning"):
        render([user, system])
    with pytest.raises(jinja2.TemplateError, match="No user query found in messages"):
        render([system])
