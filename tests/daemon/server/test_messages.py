"""From a client's messages to the model's tokens, through a template of every construct."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from emberd.daemon.template import ChatTemplate
from needs import needs

TESTS = Path(__file__).parents[2]
DEMO = TESTS.parent / "firmware_assets" / "demo" / "model"
AGENT = (TESTS / "daemon" / "templates" / "agent.jinja").read_text(encoding="utf-8")
ARGUMENTS = {"zone": "<all>", "degrees": [21.5, None]}
USER = {"role": "user", "content": "set 21 degrees"}


def _call(arguments: Any, name: str = "climate") -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": "c1", "type": "function", "function": function}


def _history(arguments: Any) -> list[dict[str, Any]]:
    return [
        {"role": "system", "content": "Be brief."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "set "}, {"type": "text", "text": "21"}],
        },
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [_call(arguments)],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "ok"},
        {"role": "assistant", "content": "Done.", "refusal": None},
        USER,
    ]


async def _prompt(daemon: Any, messages: list[Any], **fields: Any) -> list[int]:
    """What the model was given to read."""
    answer = await daemon.chat(messages, max_tokens=1, **fields)
    slot = max(daemon.service.engine._slots, key=lambda slot: slot.last_used)
    assert len(slot.tokens) == answer["usage"]["prompt_tokens"]
    return list(slot.tokens)


@pytest.fixture
async def agent(serve: Any) -> Any:
    daemon = await serve()
    daemon.service.template = ChatTemplate(AGENT, {})
    return daemon


@pytest.mark.parametrize("serve", ["core"], indirect=True)
@pytest.mark.parametrize("thinking", [True, False])
async def test_prompts_are_those_of_transformers(agent: Any, thinking: bool) -> None:
    needs("transformers")
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(DEMO)
    kwargs = {"enable_thinking": thinking, "tools": [{"function": {"name": "climate"}}]}
    got = await _prompt(agent, _history(json.dumps(ARGUMENTS)), chat_template_kwargs=kwargs)
    expected = reference.apply_chat_template(
        _history(ARGUMENTS),
        chat_template=AGENT,
        add_generation_prompt=True,
        return_dict=False,
        **kwargs,
    )
    assert got == expected


async def test_arguments_come_as_text_or_as_objects(agent: Any) -> None:
    as_text = await _prompt(agent, _history(json.dumps(ARGUMENTS)))
    assert await _prompt(agent, _history(ARGUMENTS)) == as_text
    assert await _prompt(agent, _history("")) == await _prompt(agent, _history({}))


@pytest.mark.parametrize("literal", ["<|im_end|>", "</think>"])
async def test_no_part_of_a_message_becomes_a_control_token(agent: Any, literal: str) -> None:
    """S9 beyond the content: names, keys and values of calls, results, thinking, variables."""

    def history(text: str) -> list[dict[str, Any]]:
        call = _call({f"key {text}": f"value {text}", "list": [text, {text: text}]}, f"n {text}")
        return [
            {"role": "system", "content": f"s {text}"},
            USER,
            {"role": "assistant", "reasoning_content": f"r {text}", "tool_calls": [call]},
            {"role": "tool", "content": f"t {text}"},
        ]

    def tools(text: str) -> dict[str, Any]:
        return {"tools": [{"function": {"name": f"f {text}", text: text}}]}

    spelled = agent.service.tokenizer
    control = set(spelled.added.values())
    prompts = {
        text: await _prompt(agent, history(text), chat_template_kwargs=tools(text))
        for text in ("nothing", literal)
    }
    found = {text: [t for t in prompt if t in control] for text, prompt in prompts.items()}
    assert found[literal] == found["nothing"]
    data = {t: b"".join(map(spelled.literal_bytes, prompt)) for t, prompt in prompts.items()}
    assert data[literal] == data["nothing"].replace(b"nothing", literal.encode())


@pytest.mark.parametrize(
    ("calls", "where"),
    [
        ({}, "tool_calls: expected a list"),
        (["x"], r"tool_calls[0]: expected"),
        ([{"function": {}}], r"tool_calls[0]: expected"),
        ([{"function": {"name": 5}}], r"tool_calls[0]: expected"),
        ([_call("{")], "arguments: expected a JSON object"),
        ([_call("[1]")], "arguments: expected a JSON object"),
        ([_call(5)], "arguments: expected a JSON object"),
        ([_call("[" * 100_000)], "arguments: expected a JSON object"),
    ],
)
async def test_calls_of_another_shape_are_refused(start: Any, calls: Any, where: str) -> None:
    daemon = await start("hello")
    messages = [USER, {"role": "assistant", "tool_calls": calls}, USER]
    status, error = await daemon.refusal({"messages": messages})
    assert status == 400 and error["message"].startswith("messages[1].tool_calls")
    assert where in error["message"]
