"""POST /v1/completions: raw prompts, in which control tokens' literals are control tokens."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

from aiohttp import web
from emberd.daemon.answer import Utf8Stream
from emberd.daemon.errors import EmberdError
from emberd.daemon.generation import Delta, Finish, Request, Scored, Usage
from emberd.daemon.sampling import Sampled
from emberd.daemon.server import parameters, sse
from emberd.daemon.server.body import read_object
from emberd.daemon.server.errors import to_api_error
from emberd.daemon.server.fields import Fields, invalid
from emberd.daemon.server.keys import SERVING
from emberd.daemon.server.service import Service
from emberd.daemon.stream import Stream
from emberd.daemon.text import Tokenizer, TooManyTokens

DEFAULT_MAX_TOKENS = 16  # as OpenAI's
MAX_PROMPTS = 128
MAX_LOGPROBS = 5

routes = web.RouteTableDef()


class _Logprobs:
    """Log probabilities in the layout of text completions, gathered until they are sent."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoders = {True: Utf8Stream(), False: Utf8Stream()}  # by whether of the prompt
        self._offset = 0
        self._entries: dict[str, list[Any]] = {}
        self.take()

    def add(self, tokens: Sequence[Sampled], prompt: bool) -> None:
        """More tokens, of the prompt or of the answer."""
        spell = self._tokenizer.literal_bytes if prompt else self._tokenizer.token_bytes
        for sampled in tokens:
            known = sampled.logprob is not None
            top = {self._text(token): logprob for token, logprob in sampled.top}
            self._entries["tokens"].append(self._text(sampled.token))
            self._entries["token_logprobs"].append(sampled.logprob)
            self._entries["top_logprobs"].append(top if known else None)
            self._entries["text_offset"].append(self._offset)
            self._offset += len(self._decoders[prompt].push(spell(sampled.token)))

    def take(self) -> dict[str, list[Any]]:
        """What was added since the last time."""
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        taken, self._entries = self._entries, {name: [] for name in names}
        return taken

    def _text(self, token: int) -> str:
        return self._tokenizer.literal_bytes(token).decode("utf-8", "backslashreplace")


class _Choice:
    """A choice as it comes in: `entry` is what came since the last one."""

    def __init__(self, tokenizer: Tokenizer, generation: Request, before: str) -> None:
        self._text = [before]
        self._finish: str | None = None
        reports = generation.sampling.logprobs is not None
        self._logprobs = _Logprobs(tokenizer) if reports else None

    def score(self, event: Scored) -> None:
        if self._logprobs:
            self._logprobs.add(event.logprobs, prompt=True)

    def add(self, event: Delta | Finish) -> None:
        if isinstance(event, Finish):
            self._finish = event.reason
            return
        self._text.append(event.piece.content)
        if self._logprobs:
            self._logprobs.add(event.logprobs, prompt=False)

    def entry(self, index: int) -> dict[str, Any]:
        text, self._text = "".join(self._text), []
        logprobs = self._logprobs.take() if self._logprobs else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": self._finish}


@routes.post("/v1/completions")
async def completions(request: web.Request) -> web.StreamResponse:
    service = request.app[SERVING].service
    with service.engine.awake():
        return await _answer(request, service)


async def _answer(request: web.Request, service: Service) -> web.StreamResponse:
    fields = await read_object(request)
    parameters.check_service(service, fields)
    fields.refuse("suffix", "insertion is not supported", lambda suffix: suffix == "")
    streaming = fields.boolean("stream")
    with_usage = parameters.include_usage(fields, streaming)
    echo = fields.boolean("echo")
    requests = await _requests(service, fields, echo)
    for generation in requests:
        service.engine.check(generation)
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
    for number, generation in enumerate(requests):  # in turn: a batch must not fill the queue
        choices = _choices(service, generation, echo)
        async with service.engine.submit(generation, admitted=number > 0) as stream:
            async for _ in _arriving(stream, choices):
                pass
        usages.append(stream.usage)
        body += [choice.entry(len(body) + index) for index, choice in enumerate(choices)]
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
        index = 0
        for number, generation in enumerate(requests):
            choices = _choices(service, generation, echo)
            again = first if number == 0 else service.engine.submit(generation, admitted=True)
            async with again as stream:
                async for choice in _arriving(stream, choices):
                    entry = choices[choice].entry(index + choice)
                    await sse.send(response, {**head, "choices": [entry], **tail})
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


def _choices(service: Service, generation: Request, echo: bool) -> list[_Choice]:
    before = ""
    if echo:
        data = b"".join(map(service.tokenizer.literal_bytes, generation.prompt))
        before = data.decode("utf-8", "ignore")
    return [_Choice(service.tokenizer, generation, before) for _ in range(generation.choices)]


async def _arriving(stream: Stream, choices: list[_Choice]) -> AsyncIterator[int]:
    """Hands a stream's events to its choices; yields the choice each time that one has more."""
    async for event in stream:
        if isinstance(event, Scored):
            for choice in choices:
                choice.score(event)
        else:
            choices[event.choice].add(event)
            yield event.choice


async def _requests(service: Service, fields: Fields, echo: bool) -> list[Request]:
    logprobs = fields.integer("logprobs", 0, MAX_LOGPROBS, None)
    sampling = parameters.sampling(fields, service, logprobs)
    limit = fields.integer("max_tokens", 0, parameters.MAX_TOKENS, DEFAULT_MAX_TOKENS)
    stops, choices = parameters.stops(fields), parameters.choices(fields)
    stop_tokens = parameters.stop_tokens(fields, service)
    fields.refuse("best_of", "only as many as n are generated", lambda best: best == choices)
    try:
        prompts = await asyncio.to_thread(_prompts, service, fields.get("prompt"))
    except TooManyTokens as error:
        raise parameters.too_long(service, error, limit) from None
    return [
        Request(
            prompt=prompt,
            max_tokens=limit,
            sampling=sampling,
            stop_tokens=stop_tokens,
            stops=stops,
            choices=choices,
            score_prompt=echo and logprobs is not None,
        )
        for prompt in prompts
    ]


def _prompts(service: Service, prompt: Any) -> list[list[int]]:
    """OpenAI's four forms: a string, a list of strings, token ids, a list of lists of those."""
    given = prompt if isinstance(prompt, list) and prompt else [prompt]
    if given is prompt and all(type(item) is int for item in given):
        given = [given]
    if len(given) > MAX_PROMPTS:
        raise invalid("prompt", f"at most {MAX_PROMPTS} prompts")
    return [_tokens(service, item) for item in given]


def _tokens(service: Service, prompt: Any) -> list[int]:
    if isinstance(prompt, str):
        prompt = service.tokenizer.encode_with_control(prompt, service.engine.context)
    elif not isinstance(prompt, list) or not all(type(token) is int for token in prompt):
        raise invalid("prompt", "expected a string, token ids, or a list of either")
    if not prompt:
        raise invalid("prompt", "it is empty; this model needs at least one token")
    vocabulary = service.engine.vocab_size
    if not all(0 <= token < vocabulary for token in prompt):
        raise invalid("prompt", f"token ids must be 0 to {vocabulary - 1}")
    return list(prompt)
