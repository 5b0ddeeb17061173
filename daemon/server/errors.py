"""Errors in OpenAI's shape, whatever raised them."""

from __future__ import annotations

import logging

from aiohttp import web
from aiohttp.typedefs import Handler
from emberd.daemon.engine import ContextLengthExceeded, EngineClosed, QueueFull
from emberd.daemon.errors import EmberdError
from emberd.daemon.server.api_error import ApiError
from emberd.daemon.server.index import not_found
from emberd.daemon.server.keys import SERVING
from emberd.daemon.template import TemplateRefusal

log = logging.getLogger("emberd")


def to_api_error(error: Exception) -> ApiError:
    """What a client is told about an exception."""
    match error:
        case ApiError():
            return error
        case ContextLengthExceeded():
            return ApiError(400, str(error), code="context_length_exceeded")
        case QueueFull():
            return ApiError(429, str(error), code="queue_full")
        case EngineClosed():
            return ApiError(503, str(error), code="draining")
        case TemplateRefusal():
            return ApiError(400, str(error), param="messages", code="invalid_messages")
        case RecursionError():
            return ApiError(400, "the body is nested too deep", code="invalid_json")
        case web.HTTPRequestEntityTooLarge():
            return ApiError(413, "the request body is too large", code="body_too_large")
        case web.HTTPException():
            return ApiError(error.status, error.reason, code=error.reason.lower().replace(" ", "_"))
        case EmberdError():
            return ApiError(500, str(error), code="generation_failed")
    log.error("a request failed", exc_info=error)
    return ApiError(500, "internal error; the daemon's log has the details", code="internal_error")


@web.middleware
async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turns exceptions into answers and counts answers by status."""
    try:
        response = await handler(request)
    except ConnectionError:
        raise  # the client is gone: there is nobody to tell
    except Exception as error:
        unrouted = isinstance(error, web.HTTPNotFound)
        shown = not_found(request.path) if unrouted else to_api_error(error)
        response = web.json_response(shown.body(), status=shown.status)
        if shown.status == 405 and isinstance(error, web.HTTPMethodNotAllowed):
            response.headers["Allow"] = error.headers["Allow"]
        if shown.status == 401:  # browsers then ask their user
            page = request.path.endswith(".html")
            response.headers["WWW-Authenticate"] = 'Basic realm="emberd"' if page else "Bearer"
        if request.content.exception() is not None:  # what follows on it cannot be told apart
            response.force_close()
        if shown.status == 429:
            response.headers["Retry-After"] = "1"
        if shown.code == "draining":  # who asks again should come to the next daemon
            response.force_close()
    request.app[SERVING].metrics.responses[response.status] += 1
    return response
