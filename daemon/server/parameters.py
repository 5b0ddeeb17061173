"""What chat and text completions have in common in a request."""

from __future__ import annotations

from typing import Any

from emberd.daemon.engine import ContextLengthExceeded, Engine
from emberd.daemon.generation import Usage
from emberd.daemon.sampling import SamplingParameters
from emberd.daemon.server.api_error import ApiError
from emberd.daemon.server.fields import Fields, invalid
from emberd.daemon.server.service import Service
from emberd.daemon.text import TooManyTokens

MAX_CHOICES = 16
MAX_STOPS = 16
MAX_STOP_LENGTH = 1000
MAX_LOGPROBS = 20
MAX_BIASES = 1024  # each costs time at every token
MAX_TOKENS = 1 << 31


def check_service(service: Service, fields: Fields) -> None:
    """Refuses while draining, and other models than the one served."""
    if service.draining:
        raise ApiError(503, "the daemon is shutting down", code="draining")
    name = fields.string("model")
    if name is not None and name != service.name:
        raise ApiError(
            404,
            f"the model {name!r:.80} does not exist; this daemon serves {service.name!r}",
            param="model",
            code="model_not_found",
        )


def sampling(fields: Fields, service: Service, logprobs: int | None) -> SamplingParameters:
    """Sampling parameters, the checkpoint's defaults where the request has none."""
    defaults = service.defaults
    vocabulary = service.engine.vocab_size
    return SamplingParameters(
        temperature=fields.number("temperature", 0, 2, defaults.get("temperature", 1.0)),
        top_k=max(0, fields.integer("top_k", -1, vocabulary, defaults.get("top_k", 0))),
        top_p=fields.number("top_p", 0, 1, defaults.get("top_p", 1.0)),
        min_p=fields.number("min_p", 0, 1, defaults.get("min_p", 0.0)),
        presence_penalty=fields.number("presence_penalty", -2, 2, 0.0),
        frequency_penalty=fields.number("frequency_penalty", -2, 2, 0.0),
        logit_bias=_logit_bias(fields, vocabulary),
        seed=fields.integer("seed", -(2**63), 2**64 - 1, None),
        logprobs=logprobs,
    )


def _logit_bias(fields: Fields, vocabulary: int) -> dict[int, float]:
    bias = fields.object("logit_bias")
    if len(bias.data) > MAX_BIASES:
        raise invalid("logit_bias", f"expected at most {MAX_BIASES} tokens")
    found = {}
    for key in bias.data:
        if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < vocabulary):
            raise invalid("logit_bias", f"{key[:20]!r} is not a token id below {vocabulary}")
        found[int(key)] = bias.number(key, -100, 100, 0.0)
    return found


def stops(fields: Fields) -> tuple[str, ...]:
    value: Any = fields.get("stop")
    if value is None:
        return ()
    given = [value] if isinstance(value, str) else value
    if not isinstance(given, list) or not all(isinstance(stop, str) for stop in given):
        raise invalid("stop", "expected a string or a list of strings")
    if len(given) > MAX_STOPS or any(not 0 < len(stop) <= MAX_STOP_LENGTH for stop in given):
        raise invalid(
            "stop", f"expected at most {MAX_STOPS} strings of 1 to {MAX_STOP_LENGTH} characters"
        )
    return tuple(given)


def stop_tokens(fields: Fields, service: Service) -> frozenset[int]:
    """The checkpoint's; none with ignore_eos, as in llama-server and vLLM."""
    return frozenset() if fields.boolean("ignore_eos") else service.stop_tokens


def choices(fields: Fields) -> int:
    return fields.integer("n", 1, MAX_CHOICES, 1)


def include_usage(fields: Fields, stream: bool) -> bool:
    if not stream and fields.get("stream_options") is not None:
        raise invalid("stream_options", "only allowed when stream is true")
    return fields.object("stream_options").boolean("include_usage")


def room(engine: Engine, prompt: list[int]) -> int:
    """The tokens that can be generated where the request sets no limit."""
    return max(1, engine.context - len(prompt))


def too_long(service: Service, error: TooManyTokens, asked: int | None) -> ContextLengthExceeded:
    """The refusal of a prompt that was not even tokenised; `asked`: tokens to be generated."""
    service.engine.metrics.requests["refused"] += 1
    more = "" if asked is None else f", and {asked} are to be generated"
    return ContextLengthExceeded(f"{error}{more}")


def usage(counts: list[Usage]) -> dict[str, Any]:
    """OpenAI's usage object, over the streams' counts."""
    prompt = sum(count.prompt_tokens for count in counts)
    completion = sum(count.completion_tokens for count in counts)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(count.cached_tokens for count in counts)},
        "completion_tokens_details": {
            "reasoning_tokens": sum(count.reasoning_tokens for count in counts)
        },
    }
