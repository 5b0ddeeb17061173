"""Reading request bodies."""

from __future__ import annotations

import asyncio
import json
from typing import NoReturn

from aiohttp import web
from emberd.daemon.server.api_error import ApiError
from emberd.daemon.server.fields import Fields

BODY_SECONDS = 30.0  # within which a request's body must have come


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


async def read_object(request: web.Request) -> Fields:
    """The body's JSON object. Raises ApiError 400 or 408, or 413 from aiohttp."""
    try:
        async with asyncio.timeout(BODY_SECONDS):
            body = await request.read()
    except TimeoutError:
        raise ApiError(
            408, f"the request body took over {BODY_SECONDS:g} s to come", code="timeout"
        ) from None
    except web.RequestPayloadError:
        raise ApiError(
            400, "the body is not encoded as Content-Encoding and Transfer-Encoding say"
        ) from None
    try:
        data = json.loads(body.decode(), parse_constant=_refuse_constant)
        if b"\\u" in body:  # escapes may smuggle lone surrogates in, which no UTF-8 text holds
            json.dumps(data, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not UTF-8: {error}", code="invalid_json") from None
    except UnicodeEncodeError:
        raise ApiError(
            400, "the body holds a lone surrogate, which is not a character", code="invalid_json"
        ) from None
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(data, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    return Fields(data)
