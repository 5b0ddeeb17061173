"""POST /v1/completions: raw prompts, in which control tokens' literals are control tokens."""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from emberd.daemon.errors import EmberdError
from emberd.daemon.generation import Delta, Request, Usage
from emberd.daemon.sampling import Sampled
from emberd.daemon.server import parameters, sse
from emberd.daemon.server.errors import ApiError, to_api_error
from emberd.daemon.server.fields import Fields, invalid, read_object
from emberd.daemon.server.keys import SERVICE, Service
from emberd.daemon.text import Tokenizer

DEFAULT_MAX_TOKENS = 16  # as OpenAI's
MAX_PROMPTS = 128
MAX_LOGPROBS = 5

routes = web.RouteTableDef()


@dataclass
class _Choice:
    """A choice as it is put together when it is not streamed."""

    text: list[str] = field(default_factory=list)
    logprobs: list[Sampled] = field(default_factory=list)
    finish: str | None = None


@routes.post("/v1/completions")
async def completions(request: web.Request) -> web.StreamResponse:
    service = request.app[SERVICE]
    fields = await read_object(request)
    parameters.check_service(service, fields)
    fields.refuse("suffix", "insertion is not supported", lambda suffix: suffix == "")
    streaming = fields.boolean("stream")
    with_usage = parameters.include_usage(fields, streaming)
    echo = fields.boolean("echo")
    if echo and fields.get("logprobs") is not None:
        raise ApiError(
            400, "echo: not supported together with logprobs", param="echo", code="unsupported"
        )
    requests = await _requests(service, fields)
    head = {
        "id": f"cmpl-{uuid.uuid4().hex}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": service.name,
    }
    if streaming:
        return await _stream(request, service, requests, head, with_usage, echo)
    return await _whole(service, requests, head, echo)


async def _whole(
    service: Service, requests: list[Request], head: dict[str, Any], echo: bool
) -> web.Response:
    body: list[dict[str, Any]] = []
    usages: list[Usage] = []
    for generation in requests:  # in turn: a batch must not fill the queue
        choices = [_Choice() for _ in range(generation.choices)]
        async with service.engine.submit(generation) as stream:
            async for event in stream:
                choice = choices[event.choice]
                if isinstance(event, Delta):
                    choice.text.append(event.piece.content)
                    choice.logprobs += event.logprobs
                else:
                    choice.finish = event.reason
        usages.append(stream.usage)
        before = _echoed(service.tokenizer, generation) if echo else ""
        for choice in choices:
            reports = generation.sampling.logprobs is not None
            body.append(
                {
                    "index": len(body),
                    "text": before + "".join(choice.text),
                    "logprobs": _logprobs(choice.logprobs, service.tokenizer) if reports else None,
                    "finish_reason": choice.finish,
                }
            )
    return web.json_response({**head, "choices": body, "usage": parameters.usage(usages)})


async def _stream(
    request: web.Request,
    service: Service,
    requests: list[Request],
    head: dict[str, Any],
    with_usage: bool,
    echo: bool,
) -> web.StreamResponse:
    tail: dict[str, Any] = {"usage": None} if with_usage else {}
    usages: list[Usage] = []
    first = service.engine.submit(requests[0])  # a refusal must come before the 200
    try:
        response = await sse.open_stream(request)
    except BaseException:
        service.engine.cancel(first)
        raise

    async def send(
        index: int, text: str, logprobs: dict[str, Any] | None, finish: str | None
    ) -> None:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}
        await sse.send(response, {**head, "choices": [choice], **tail})

    try:
        index = 0
        for number, generation in enumerate(requests):
            async with first if number == 0 else service.engine.submit(generation) as stream:
                started: set[int] = set()
                async for event in stream:
                    if echo and event.choice not in started:
                        before = _echoed(service.tokenizer, generation)
                        await send(index + event.choice, before, None, None)
                    started.add(event.choice)
                    if isinstance(event, Delta):
                        found = event.logprobs and _logprobs(event.logprobs, service.tokenizer)
                        text = event.piece.content
                        await send(index + event.choice, text, found or None, None)
                    else:
                        await send(index + event.choice, "", None, event.reason)
            usages.append(stream.usage)
            index += generation.choices
        if with_usage:
            usage = parameters.usage(usages)
            await sse.send(response, {**head, "choices": [], "usage": usage})
        await sse.send(response, "[DONE]")
    except EmberdError as error:
        await sse.send(response, to_api_error(error).body())
    finally:
        service.engine.cancel(first)
    await response.write_eof()
    return response


def _echoed(tokenizer: Tokenizer, generation: Request) -> str:
    data = b"".join(map(tokenizer.literal_bytes, generation.prompt))
    return data.decode("utf-8", "ignore")


def _logprobs(tokens: list[Sampled] | tuple[Sampled, ...], tokenizer: Tokenizer) -> dict[str, Any]:
    def text(token: int) -> str:
        return tokenizer.literal_bytes(token).decode("utf-8", "backslashreplace")

    return {
        "tokens": [text(sampled.token) for sampled in tokens],
        "token_logprobs": [sampled.logprob for sampled in tokens],
        "top_logprobs": [
            {text(token): logprob for token, logprob in sampled.top} for sampled in tokens
        ],
    }


async def _requests(service: Service, fields: Fields) -> list[Request]:
    logprobs = fields.integer("logprobs", 0, MAX_LOGPROBS, None)
    sampling = parameters.sampling(fields, service, logprobs)
    limit = fields.integer("max_tokens", 1, parameters.MAX_TOKENS, DEFAULT_MAX_TOKENS)
    stops, choices = parameters.stops(fields), parameters.choices(fields)
    prompts = await asyncio.to_thread(_prompts, service, fields.get("prompt"))
    return [
        Request(
            prompt=prompt,
            max_tokens=limit,
            sampling=sampling,
            stop_tokens=service.stop_tokens,
            stops=stops,
            choices=choices,
        )
        for prompt in prompts
    ]


def _prompts(service: Service, prompt: Any) -> list[list[int]]:
    """OpenAI's four forms: a string, a list of strings, token ids, a list of lists of those."""
    given = prompt if isinstance(prompt, list) and prompt else [prompt]
    if all(type(item) is int for item in given):
        given = [given]
    if len(given) > MAX_PROMPTS:
        raise invalid("prompt", f"at most {MAX_PROMPTS} prompts")
    return [_tokens(service, item) for item in given]


def _tokens(service: Service, prompt: Any) -> list[int]:
    if isinstance(prompt, str):
        prompt = service.tokenizer.encode_with_control(prompt)
    elif not isinstance(prompt, list) or not all(type(token) is int for token in prompt):
        raise invalid("prompt", "expected a string, token ids, or a list of either")
    if not prompt:
        raise invalid("prompt", "it is empty; this model needs at least one token")
    vocabulary = service.engine.vocab_size
    if not all(0 <= token < vocabulary for token in prompt):
        raise invalid("prompt", f"token ids must be 0 to {vocabulary - 1}")
    return list(prompt)
