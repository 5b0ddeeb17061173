"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from emberd.daemon.errors import EmberdError
from emberd.daemon.generation import Delta, Request, Scored
from emberd.daemon.prompt import chat_prompt
from emberd.daemon.sampling import Sampled
from emberd.daemon.server import parameters, sse
from emberd.daemon.server.api_error import ApiError
from emberd.daemon.server.body import read_object
from emberd.daemon.server.errors import to_api_error
from emberd.daemon.server.fields import Fields, invalid
from emberd.daemon.server.keys import SERVING
from emberd.daemon.server.messages import read_messages
from emberd.daemon.server.service import Service
from emberd.daemon.stream import Stream
from emberd.daemon.text import Tokenizer, TooManyTokens

routes = web.RouteTableDef()


@dataclass
class _Choice:
    """A choice as it is put together when it is not streamed."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish: str | None = None


@routes.post("/v1/chat/completions")
async def chat_completions(request: web.Request) -> web.StreamResponse:
    service = request.app[SERVING].service
    with service.engine.awake():
        return await _answer(request, service)


async def _answer(request: web.Request, service: Service) -> web.StreamResponse:
    fields = await read_object(request)
    parameters.check_service(service, fields)
    _refuse_unsupported(fields)
    streaming = fields.boolean("stream")
    with_usage = parameters.include_usage(fields, streaming)
    generation = await _generation(service, fields)
    head = {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "created": int(time.time()),
        "model": service.name,
    }
    async with service.engine.submit(generation) as stream:
        if streaming:
            return await _stream(request, service, stream, head, with_usage)
        return await _whole(service, stream, head)


async def _whole(service: Service, stream: Stream, head: dict[str, Any]) -> web.Response:
    choices = [_Choice() for _ in range(stream.request.choices)]
    async for event in stream:
        assert not isinstance(event, Scored)
        choice = choices[event.choice]
        if isinstance(event, Delta):
            choice.content.append(event.piece.content)
            choice.reasoning.append(event.piece.reasoning)
            choice.logprobs += _logprobs(event.logprobs, service.tokenizer)
        else:
            choice.finish = event.reason
    reports = stream.request.sampling.logprobs is not None
    body = [
        {
            "index": index,
            "message": {"role": "assistant", "content": "".join(choice.content)}
            | ({"reasoning_content": text} if (text := "".join(choice.reasoning)) else {}),
            "logprobs": {"content": choice.logprobs, "refusal": None} if reports else None,
            "finish_reason": choice.finish,
        }
        for index, choice in enumerate(choices)
    ]
    return web.json_response(
        {
            **head,
            "object": "chat.completion",
            "choices": body,
            "usage": parameters.usage([stream.usage]),
        }
    )


async def _stream(
    request: web.Request, service: Service, stream: Stream, head: dict[str, Any], with_usage: bool
) -> web.StreamResponse:
    head = {**head, "object": "chat.completion.chunk"}
    tail: dict[str, Any] = {"usage": None} if with_usage else {}
    response = await sse.open_stream(request)

    async def send(
        index: int, delta: dict[str, str], logprobs: Any = None, finish: str | None = None
    ) -> None:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        await sse.send(response, {**head, "choices": [choice], **tail})

    try:
        started: set[int] = set()
        async for event in stream:
            assert not isinstance(event, Scored)
            if event.choice not in started:
                started.add(event.choice)
                await send(event.choice, {"role": "assistant", "content": ""})
            if isinstance(event, Delta):
                content, reasoning = event.piece.content, event.piece.reasoning
                delta = {"content": content} if content or not reasoning else {}
                delta |= {"reasoning_content": reasoning} if reasoning else {}
                found = _logprobs(event.logprobs, service.tokenizer)
                await send(
                    event.choice, delta, {"content": found, "refusal": None} if found else None
                )
            else:
                await send(event.choice, {}, finish=event.reason)
        if with_usage:
            usage = parameters.usage([stream.usage])
            await sse.send(response, {**head, "choices": [], "usage": usage})
        await sse.send(response, "[DONE]")
    except EmberdError as error:
        await sse.send(response, to_api_error(error).body())
    await response.write_eof()
    return response


def _logprobs(tokens: tuple[Sampled, ...], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    def entry(token: int, logprob: float | None) -> dict[str, Any]:
        data = tokenizer.literal_bytes(token)
        text = data.decode("utf-8", "backslashreplace")
        return {"token": text, "logprob": logprob, "bytes": list(data)}

    return [
        {
            **entry(sampled.token, sampled.logprob),
            "top_logprobs": [entry(token, logprob) for token, logprob in sampled.top],
        }
        for sampled in tokens
    ]


def _refuse_unsupported(fields: Fields) -> None:
    fields.refuse("tools", "tool calls are not supported yet", lambda tools: tools == [])
    fields.refuse("functions", "function calls are not supported yet", lambda tools: tools == [])
    fields.refuse(
        "response_format",
        "only the type 'text' is supported, not json_object or json_schema",
        lambda value: isinstance(value, dict) and value.get("type") == "text",
    )


async def _generation(service: Service, fields: Fields) -> Request:
    """The request to the engine. Template and tokenizer work in a thread: prompts may be long."""
    messages = read_messages(fields)
    variables = fields.object("chat_template_kwargs").data
    wanted = fields.integer("top_logprobs", 0, parameters.MAX_LOGPROBS, 0)
    if wanted and not fields.boolean("logprobs"):
        raise invalid("top_logprobs", "needs logprobs to be true")
    sampling = parameters.sampling(fields, service, wanted if fields.boolean("logprobs") else None)
    limit = fields.integer("max_completion_tokens", 1, parameters.MAX_TOKENS, None)
    if limit is None:
        limit = fields.integer("max_tokens", 1, parameters.MAX_TOKENS, None)
    stops, choices = parameters.stops(fields), parameters.choices(fields)
    stop_tokens = parameters.stop_tokens(fields, service)
    try:
        prompt, boundary = await asyncio.to_thread(_prompt, service, messages, variables)
    except TooManyTokens as error:
        raise parameters.too_long(service, error, limit) from None
    return Request(
        prompt=prompt,
        boundary=boundary,
        max_tokens=limit or parameters.room(service.engine, prompt),
        sampling=sampling,
        stop_tokens=stop_tokens,
        stops=stops,
        choices=choices,
        thinking=_opens_thinking(service.tokenizer, prompt[boundary or 0 :]),
    )


def _prompt(
    service: Service, messages: list[dict[str, Any]], variables: dict[str, Any]
) -> tuple[list[int], int | None]:
    if service.template is None:
        raise ApiError(
            400, "this model has no chat template; use /v1/completions", code="no_chat_template"
        )
    prompt, boundary = chat_prompt(
        service.tokenizer, service.template, messages, variables, service.engine.context
    )
    if not prompt:
        raise ApiError(400, "the messages render to an empty prompt", param="messages")
    return prompt, boundary


def _opens_thinking(tokenizer: Tokenizer, tail: list[int]) -> bool:
    """Whether the last thinking token of the generation prompt opens."""
    marks = (tokenizer.think_open, tokenizer.think_close)
    last = next((token for token in reversed(tail) if token in marks), None)
    return last is not None and last == tokenizer.think_open
