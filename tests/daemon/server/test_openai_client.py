"""OpenAI's own client, unchanged."""

from __future__ import annotations

import math
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

MESSAGES: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture
def client_of() -> Any:
    return lambda daemon: AsyncOpenAI(base_url=f"{daemon.url}/v1", api_key="any", max_retries=0)


async def test_chat(start: Any, client_of: Any) -> None:
    client = client_of(await start("hello world"))
    answer = await client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0)
    assert answer.choices[0].message.content == "hello world"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


async def test_chat_stream_with_usage(start: Any, client_of: Any) -> None:
    client = client_of(await start("hello 世界"))
    stream = await client.chat.completions.create(
        model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "hello 世界"
    assert chunks[-1].usage.completion_tokens > 0


async def test_chat_logprobs(start: Any, client_of: Any) -> None:
    client = client_of(await start("hello 世"))
    answer = await client.chat.completions.create(
        model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=2, temperature=0
    )
    entries = answer.choices[0].logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == "hello 世"
    for entry in entries:
        assert len(entry.top_logprobs) == 2
        assert entry.logprob == entry.top_logprobs[0].logprob
        assert 0.9 < math.exp(entry.logprob) < 1


async def test_streamed_logprobs_stop_with_the_text(start: Any, client_of: Any) -> None:
    client = client_of(await start("hello ## world"))
    stream = await client.chat.completions.create(
        model="tiny", messages=MESSAGES, logprobs=True, stream=True, stop="##", temperature=0
    )
    choices = [chunk.choices[0] async for chunk in stream]
    text = "".join(choice.delta.content or "" for choice in choices)
    entries = [e for choice in choices if choice.logprobs for e in choice.logprobs.content]
    assert text == "hello "
    assert "".join(entry.token for entry in entries).startswith("hello")
    assert "##" not in "".join(entry.token for entry in entries)


async def test_choices_are_the_runs_of_their_own_seeds(start: Any, client_of: Any) -> None:
    client = client_of(await start(None))
    ask = client.chat.completions.create
    fields = {"model": "tiny", "messages": MESSAGES, "seed": 7, "max_tokens": 12}
    several = await ask(n=3, **fields)
    again = await ask(n=3, **fields)
    texts = [choice.message.content for choice in several.choices]
    assert texts == [choice.message.content for choice in again.choices]
    assert len(set(texts)) == 3
    assert (await ask(n=1, **fields)).choices[0].message.content == texts[0]


async def test_completions(start: Any, client_of: Any) -> None:
    client = client_of(await start(None))
    fields: Any = {"model": "tiny", "temperature": 0, "max_tokens": 8}
    answer = await client.completions.create(prompt=["one", "two"], n=2, **fields)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.choices[0].text == answer.choices[1].text != answer.choices[2].text
    echoed = await client.completions.create(prompt="one", echo=True, **fields)
    assert echoed.choices[0].text == "one" + answer.choices[0].text
    stream = await client.completions.create(prompt="two", stream=True, **fields)
    text = "".join([chunk.choices[0].text async for chunk in stream])
    assert text == answer.choices[2].text
    scored = await client.completions.create(prompt=[1, 2, 3], logprobs=2, **fields)
    assert all(len(top) == 2 for top in scored.choices[0].logprobs.top_logprobs)


async def test_choices_of_a_stream_are_those_of_the_whole(serve: Any, client_of: Any) -> None:
    daemon = await serve()
    ask = client_of(daemon).chat.completions.create
    fields: Any = {"model": daemon.service.name, "messages": MESSAGES, "n": 3, "seed": 5}
    fields |= {"temperature": 1, "max_completion_tokens": 9, "max_tokens": 1}
    whole = await ask(**fields)
    texts = ["", "", ""]
    async for chunk in await ask(stream=True, **fields):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]
    assert whole.usage.completion_tokens > 3


async def test_bias_decides_the_token(serve: Any, client_of: Any) -> None:
    daemon = await serve()
    (token,) = daemon.service.tokenizer.encode("#")
    answer = await client_of(daemon).chat.completions.create(
        model=daemon.service.name,
        messages=MESSAGES,
        logit_bias={str(token): 100},
        max_tokens=3,
        response_format={"type": "text"},
        extra_body={"a_field_of_tomorrow": {"x": [1]}, "user": None, "top_k": -1},
    )
    assert answer.choices[0].message.content == "###"


async def test_prompts_are_scored(serve: Any, client_of: Any) -> None:
    daemon = await serve()
    answer = await client_of(daemon).completions.create(
        model=daemon.service.name, prompt="one two", echo=True, logprobs=1, max_tokens=0
    )
    choice = answer.choices[0]
    assert choice.text == "".join(choice.logprobs.tokens) == "one two"
    assert choice.logprobs.token_logprobs[0] is None
    assert choice.logprobs.text_offset[:2] == [0, len(choice.logprobs.tokens[0])]


async def test_wrong_types_carry_the_field_at_fault(serve: Any, client_of: Any) -> None:
    daemon = await serve(max_body_bytes=2000)
    ask = client_of(daemon).chat.completions.create
    fields: Any = {"model": daemon.service.name, "messages": MESSAGES}
    with pytest.raises(openai.BadRequestError) as caught:
        await ask(**fields, temperature="hot")
    assert (caught.value.param, caught.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.BadRequestError, match="json_object") as caught:
        await ask(**fields, response_format={"type": "json_object"})
    assert caught.value.code == "unsupported"
    with pytest.raises(openai.APIStatusError) as large:
        await ask(**fields, user="x" * 3000)
    assert (large.value.status_code, large.value.code) == (413, "body_too_large")


async def test_other_origins_get_no_permission(start: Any) -> None:
    daemon = await start("hello")
    headers = {"Origin": "http://elsewhere.example", "Access-Control-Request-Method": "POST"}
    for method, expected in (("OPTIONS", 405), ("POST", 200)):
        async with daemon.http.request(
            method,
            f"{daemon.url}/v1/chat/completions",
            headers=headers,
            json={"messages": MESSAGES},
        ) as response:
            assert response.status == expected
            assert not [name for name in response.headers if name.startswith("Access-Control")]


async def test_models(start: Any, client_of: Any) -> None:
    client = client_of(await start("x"))
    (model,) = [model async for model in client.models.list()]
    assert (model.id, model.object, model.owned_by) == ("tiny", "model", "emberd")
    assert isinstance(model.created, int) and model.context_length == 4096
    assert (await client.models.retrieve("tiny")).id == "tiny"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("another")


async def test_errors(start: Any, client_of: Any) -> None:
    daemon = await start("x", api_key="secret")
    with pytest.raises(openai.AuthenticationError):
        await client_of(daemon).models.list()
    client = AsyncOpenAI(base_url=f"{daemon.url}/v1", api_key="secret", max_retries=0)
    with pytest.raises(openai.BadRequestError, match="expected 0 to 2"):
        await client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=9)
    with pytest.raises(openai.NotFoundError, match="serves 'tiny'"):
        await client.chat.completions.create(model="gpt", messages=MESSAGES)
