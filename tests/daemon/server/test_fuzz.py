"""Random requests made of known fields and odd values: an answer or a refusal, never a failure."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

ODD: list[Any] = [
    None, True, False, 0, 1, -1, 2, 0.5, -0.0, 1e308, 1e-308, 2**31, 2**53 + 1, -(2**63), 10**25,
    "", "x", "\0", "\ufeff", "é\u0301", "<|im_end|>", "</think>", "{{ 7 * 7 }}", "{% raw %}",
    "a" * 5000, [], [None], [[]], [1, 2, 3], ["x", "y"], {}, {"x": 1}, {"1": 1}, {"type": "text"},
    {"role": "user"}, [{"type": "text", "text": "x"}], [{"type": "text"}], [{"function": {}}],
]  # fmt: skip
SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty",
    "logit_bias", "max_tokens", "n", "stop", "stream", "stream_options", "ignore_eos", "logprobs",
    "model", "user", "best_of",
)  # fmt: skip
CHAT = (*SAMPLING, "top_logprobs", "max_completion_tokens", "tools", "tool_choice", "functions",
        "response_format", "chat_template_kwargs", "metadata")  # fmt: skip
TEXT = (*SAMPLING, "echo", "suffix")
MESSAGE = ("role", "content", "name", "reasoning_content", "tool_calls", "tool_call_id")


def _message(rng: random.Random) -> Any:
    if rng.random() < 0.05:
        return rng.choice(ODD)
    roles = (*["user"] * 6, "assistant", "assistant", "tool", "system", "developer", "function")
    message: dict[str, Any] = {"role": rng.choice(roles), "content": rng.choice(("x", "", "好"))}
    for name in rng.sample(MESSAGE, rng.choice((0, 0, 0, 0, 1, 2))):
        message[name] = rng.choice(ODD)
    return message


def _fields(rng: random.Random, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: rng.choice(ODD) for name in rng.sample(names, rng.choice((0, 1, 1, 1, 2)))}


def _body(rng: random.Random, chat: bool) -> dict[str, Any]:
    base: dict[str, Any] = {"max_tokens": rng.randint(1, 4)}
    if chat:
        messages = [_message(rng) for _ in range(rng.choice((0, 1, 1, 1, 2, 4)))]
        return base | {"messages": messages} | _fields(rng, CHAT)
    prompt = rng.choice([*ODD, "hello", ["a", "b"], [[1], [2, 3]]])
    return base | {"prompt": prompt} | _fields(rng, TEXT)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_every_request_is_answered_or_refused(serve: Any, path: str) -> None:
    daemon = await serve(context=256, max_queue=4)
    rng = random.Random(5)
    statuses = []
    for _ in range(1200):
        body = _body(rng, path.endswith("chat/completions"))
        async with daemon.post(path, body) as response:
            text = await response.text()
            statuses.append(response.status)
        if response.status == 200:
            assert '"error"' not in text, body
            continue
        assert response.status in (400, 404), (body, text)
        error = json.loads(text)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert 0 < len(error["message"]) < 400, body
    assert min(statuses.count(200), statuses.count(400)) > 100, statuses
    assert daemon.service.engine.metrics.requests["failed"] == 0
    await daemon.idle()
