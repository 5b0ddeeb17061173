"""Text completions: scored prompts, echoes, limits of nothing, best_of."""

from __future__ import annotations

import json
from typing import Any

import pytest

PROMPT = "<|im_start|>user\nset 21 degrees, 龘é<|im_end|>\n<|im_start|>assistant\n"


async def _complete(daemon: Any, prompt: Any = PROMPT, **fields: Any) -> Any:
    body = {"prompt": prompt, "temperature": 0, **fields}
    async with daemon.post("/v1/completions", body) as response:
        answer = await response.json()
        assert response.status == 200, answer
        return answer


async def _streamed(daemon: Any, **fields: Any) -> list[Any]:
    body = {"prompt": PROMPT, "temperature": 0, "stream": True, **fields}
    async with daemon.post("/v1/completions", body) as response:
        lines = (await response.read()).decode().splitlines()
    data = [line.removeprefix("data: ") for line in lines if line]
    assert data.pop() == "[DONE]"
    return [json.loads(line) for line in data]


async def test_a_prompt_is_scored_token_by_token(serve: Any) -> None:
    daemon = await serve()
    answer = await _complete(daemon, echo=True, logprobs=2, max_tokens=0)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
    assert answer["usage"]["completion_tokens"] == 0
    report = choice["logprobs"]
    ids = daemon.service.tokenizer.encode_with_control(PROMPT)
    spelled = [daemon.service.tokenizer.literal_bytes(token) for token in ids]
    assert report["tokens"] == [data.decode("utf-8", "backslashreplace") for data in spelled]
    assert report["token_logprobs"][0] is None and report["top_logprobs"][0] is None
    assert all(logprob <= 0 for logprob in report["token_logprobs"][1:])
    for token, logprob, top in list(zip(*list(report.values())[:3], strict=True))[1:]:
        assert len(top) == 2 and max(top.values()) >= logprob
        assert top.get(token, logprob) == logprob
    starts = [len(b"".join(spelled[:i]).decode("utf-8", "ignore")) for i in range(len(ids))]
    assert report["text_offset"] == starts


@pytest.mark.parametrize("prompt", [5, True, 1.5, {}])
async def test_what_is_no_prompt_is_refused(start: Any, prompt: Any) -> None:
    daemon = await start("hello")
    status, error = await daemon.refusal({"prompt": prompt}, "/v1/completions")
    assert (status, error["param"]) == (400, "prompt")


@pytest.mark.parametrize("length", [1, 2, 17])
async def test_scores_are_the_log_probabilities_of_generation(serve: Any, length: int) -> None:
    """What a model generates is scored, as a prompt, exactly as it was sampled."""
    daemon = await serve(slots=1)
    prompt = daemon.service.tokenizer.encode_with_control(PROMPT)[:length]
    answer = await _complete(daemon, prompt, logprobs=3, max_tokens=70, **daemon.endless)
    sampled = answer["choices"][0]["logprobs"]
    (slot,) = daemon.service.engine._slots
    scored = await _complete(daemon, list(slot.tokens), logprobs=3, max_tokens=0, echo=True)
    for name in ("tokens", "token_logprobs", "top_logprobs"):
        assert scored["choices"][0]["logprobs"][name][length:] == sampled[name][:-1]
    assert scored["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_streams_are_whole_answers_in_pieces(serve: Any) -> None:
    daemon = await serve()
    fields = {"echo": True, "logprobs": 1, "n": 2, "max_tokens": 9, "stop": "~", **daemon.endless}
    whole = await _complete(daemon, **fields)
    *chunks, last = await _streamed(daemon, stream_options={"include_usage": True}, **fields)
    for choice in whole["choices"]:
        pieces = [e for c in chunks for e in c["choices"] if e["index"] == choice["index"]]
        assert "".join(piece["text"] for piece in pieces) == choice["text"]
        for name, values in choice["logprobs"].items():
            assert [v for piece in pieces for v in piece["logprobs"][name]] == values
        finishes = [piece["finish_reason"] for piece in pieces]
        assert finishes == [None] * (len(pieces) - 1) + [choice["finish_reason"]]
    assert last["choices"] == [] and last["usage"] == whole["usage"]


async def test_no_tokens_at_all_only_read_the_prompt(serve: Any) -> None:
    daemon = await serve(slots=1)
    ids = daemon.service.tokenizer.encode_with_control(PROMPT)
    answer = await _complete(daemon, max_tokens=0, n=2)
    ends = [(choice["text"], choice["finish_reason"]) for choice in answer["choices"]]
    assert ends == [("", "length")] * 2
    again = (await _complete(daemon, max_tokens=1))["usage"]
    assert again["prompt_tokens_details"]["cached_tokens"] == len(ids) - 1
    (chunk, other) = await _streamed(daemon, max_tokens=0, n=2)
    assert (chunk["choices"][0]["index"], other["choices"][0]["index"]) == (0, 1)


async def test_a_prompt_that_fills_the_context_can_be_scored(serve: Any) -> None:
    daemon = await serve(context=64)
    ids = (daemon.service.tokenizer.encode_with_control(PROMPT) * 4)[:64]
    answer = await _complete(daemon, ids, max_tokens=0, echo=True, logprobs=0)
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == 64
    body = {"prompt": [*ids, 1], "max_tokens": 0}
    status, error = await daemon.refusal(body, "/v1/completions")
    assert (status, error["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [10**9]}, "prompt"),
        ({"prompt": [10**30]}, "prompt"),
        ({"prompt": [[1], [10**9]]}, "prompt"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"logprobs": 6}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"echo": "yes"}, "echo"),
        ({"best_of": 3}, "best_of"),
        ({"suffix": "tail"}, "suffix"),
    ],
    ids=str,
)
async def test_bad_fields_are_refused(start: Any, fields: dict[str, Any], param: str) -> None:
    daemon = await start(None)
    status, error = await daemon.refusal({"prompt": "x", **fields}, "/v1/completions")
    assert (status, error["param"]) == (400, param)
    await _complete(daemon, best_of=1, suffix="", max_tokens=1)
