"""Chat templates against transformers' own rendering: the demo's, and one of every construct."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jinja2
import pytest
from emberd.compile.tokenizer import compile_tokenizer
from emberd.daemon import template as template_module
from emberd.daemon.errors import EmberdError
from emberd.daemon.template import ChatTemplate, TemplateRefusal
from emberd.daemon.text import Tokenizer, special_tokens
from needs import needs

DEMO = Path(__file__).parents[2] / "firmware_assets" / "demo" / "model"
AGENT = (Path(__file__).parent / "templates" / "agent.jinja").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def demo() -> tuple[Tokenizer, ChatTemplate, Any]:
    needs("transformers")
    from transformers import AutoTokenizer

    config = json.loads((DEMO / "tokenizer_config.json").read_text(encoding="utf-8"))
    source = (DEMO / "chat_template.jinja").read_text(encoding="utf-8")
    tokenizer = Tokenizer(compile_tokenizer((DEMO / "tokenizer.json").read_text(encoding="utf-8")))
    reference = AutoTokenizer.from_pretrained(DEMO)
    return tokenizer, ChatTemplate(source, special_tokens(config)), reference


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("generation_prompt", [False, True])
def test_chat_prompts_are_those_of_transformers(
    demo: tuple[Tokenizer, ChatTemplate, Any], thinking: bool, generation_prompt: bool
) -> None:
    tokenizer, template, reference = demo
    messages = [
        {"role": "system", "content": "You are a device.\n"},
        {"role": "user", "content": "  把温度调到 21°\n\n"},
        {"role": "assistant", "content": '<think>\nhm\n</think>\n\nOK {"a": 1}'},
        {"role": "user", "content": "and é\u0301 🎉"},
    ]
    names = {"enable_thinking": thinking}
    ids = tokenizer.encode_with_control(template.render(messages, generation_prompt, names))
    expected = reference.apply_chat_template(
        messages, add_generation_prompt=generation_prompt, return_dict=False, **names
    )
    assert ids == expected


USER = {"role": "user", "content": "  把温度调到 21°\n\n"}
CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "climate", "arguments": {"zone": "all", "degrees": [21.5, None, True]}},
}
OTHER_CALL = {"type": "function", "function": {"name": "fan", "arguments": {}}}
TOOL = {
    "type": "function",
    "function": {
        "name": "climate",
        "description": 'Sets <degrees> & "zone" — 温度',
        "parameters": {"type": "object", "properties": {"degrees": {"type": "number"}}},
    },
}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one question": [USER],
    "system": [{"role": "system", "content": " Be brief. \n"}, USER],
    "parts": [
        {"role": "system", "content": [{"type": "text", "text": "Be "}, {"text": "brief."}]},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": ""}]},
        {
            "role": "user",
            "content": [{"type": "image"}, {"type": "text", "text": "and é\u0301 🎉"}],
        },
    ],
    "old thinking": [
        USER,
        {"role": "assistant", "content": "<think>\nhm, 21\n</think>\n\nOK {{ 1 }}"},
        USER,
        {"role": "assistant", "content": "Yes.", "reasoning_content": "why not?\n"},
        {"role": "user", "content": "and then?"},
    ],
    "tools at work": [
        {"role": "system", "content": ""},
        USER,
        {"role": "assistant", "content": "Let me.", "reasoning_content": "call it"}
        | {"tool_calls": [CALL, OTHER_CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "ok"},
        {"role": "tool", "content": [{"type": "text", "text": '{"x": "<y>"}'}]},
        {"role": "assistant", "content": None, "tool_calls": [OTHER_CALL]},
        {"role": "tool", "content": "done {% raw %}"},
    ],
    "a result as a question": [
        USER,
        {"role": "assistant", "content": "x"},
        {"role": "user", "content": "<result>\n1\n</result>"},
        {"role": "assistant", "content": "</think>y</think>\n\nz"},
    ],
    "blank": [{"role": "user", "content": " \n\t "}, {"role": "assistant", "content": ""}],
}
VARIABLES: list[dict[str, Any]] = [
    {},
    {"enable_thinking": True},
    {"enable_thinking": False},
    {"enable_thinking": None, "preserve_thinking": True, "dated": True},
    {"tools": [TOOL, {"type": "function", "function": {"name": "fan"}}]},
]


@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("variables", VARIABLES, ids=str)
@pytest.mark.parametrize("generation_prompt", [False, True])
def test_every_construct_renders_as_in_transformers(
    demo: tuple[Tokenizer, ChatTemplate, Any],
    name: str,
    variables: dict[str, Any],
    generation_prompt: bool,
) -> None:
    _, _, reference = demo
    messages = CONVERSATIONS[name]
    expected = reference.apply_chat_template(
        messages,
        chat_template=AGENT,
        tokenize=False,
        add_generation_prompt=generation_prompt,
        **variables,
    )
    assert ChatTemplate(AGENT, {}).render(messages, generation_prompt, variables) == expected


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "There are no messages."),
        ([{"role": "system", "content": "x"}], "Nobody asks anything."),
        ([USER, {"role": "system", "content": "x"}], "The system message must come first."),
        ([{"role": "system", "content": [{"type": "image"}]}, USER], "holds a picture"),
        ([USER, {"role": "user", "content": [{"type": "sound"}]}], "Unknown kind of part: sound"),
        ([{"role": "user", "content": 5}], "unknown type"),
        ([USER, {"role": "robot", "content": "x"}], "Unknown role: robot"),
    ],
)
def test_refusals_are_those_of_transformers(
    demo: tuple[Tokenizer, ChatTemplate, Any], messages: list[dict[str, Any]], reason: str
) -> None:
    _, _, reference = demo
    if messages:  # transformers takes no empty chat
        with pytest.raises(jinja2.TemplateError) as expected:
            reference.apply_chat_template(messages, chat_template=AGENT, tokenize=False)
        assert reason in str(expected.value)
    with pytest.raises(TemplateRefusal) as refused:
        ChatTemplate(AGENT, {}).render(messages, True, {})
    assert reason in str(refused.value)


def _render(source: str, **names: Any) -> str:
    return ChatTemplate(source, {"eos_token": "<e>"}).render([{"role": "user"}], False, names)


def test_templates_have_what_transformers_gives_them() -> None:
    assert _render("{{ x | tojson }}{{ eos_token }}", x={"ü": "<"}) == '{"ü": "<"}<e>'
    assert _render("{% generation %}a{{ x }}{% endgeneration %}", x="b") == "ab"
    assert (
        _render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}")
        == "01"
    )
    assert len(_render("{{ strftime_now('%Y') }}")) == 4


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('No.') }}", "^No\\.$"),
        ("{{ 'x' * 1000000000000 }}", "too long"),
        ("{{ 9 ** 9 }}", "not allowed"),
        ("{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}", "too long"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|safely"),
        ("{{ messages[0].content + 'x' }}", "no attribute 'content'"),
    ],
)
def test_faulty_templates_are_refused(source: str, reason: str) -> None:
    with pytest.raises(TemplateRefusal, match=reason):
        _render(source)


def test_an_endless_template_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_module, "MAX_SECONDS", 0.05)
    loops = "".join(f"{{% for i{n} in range(99999) %}}" for n in range(4))
    with pytest.raises(TemplateRefusal, match="took over"):
        _render(loops + "{% endfor %}" * 4)


def test_a_template_with_a_syntax_error_names_it() -> None:
    with pytest.raises(EmberdError, match="chat template"):
        ChatTemplate("{% for %}", {})
