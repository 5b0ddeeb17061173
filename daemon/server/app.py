"""The HTTP application: a model's service and its routes."""

from __future__ import annotations

import asyncio
import base64
import hmac
from collections.abc import AsyncIterator

from aiohttp import web
from aiohttp.typedefs import Handler
from emberd.daemon.errors import EmberdError
from emberd.daemon.server import chat, completions, experts, health, models
from emberd.daemon.server.api_error import ApiError
from emberd.daemon.server.errors import errors
from emberd.daemon.server.keys import SERVING, Serving


@web.middleware
async def _authenticate(request: web.Request, handler: Handler) -> web.StreamResponse:
    key = request.app[SERVING].config.api_key.encode()
    if not key or not request.path.startswith("/v1/"):
        return await handler(request)
    if not hmac.compare_digest(_given_key(request.headers.get("Authorization", "")), key):
        raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key")
    return await handler(request)


def _given_key(authorization: str) -> bytes:
    """The bearer token; or the password of HTTP Basic, which is how browsers send one."""
    scheme, _, credentials = authorization.partition(" ")
    if scheme == "Bearer":
        return credentials.encode(errors="surrogateescape")
    if scheme != "Basic":
        return b""
    try:
        return base64.b64decode(credentials, validate=True).partition(b":")[2]
    except ValueError:
        return b""


@web.middleware
async def _wait_until_loaded(request: web.Request, handler: Handler) -> web.StreamResponse:
    if request.path.startswith("/v1/"):
        try:
            await asyncio.shield(request.app[SERVING].loading)
        except EmberdError as error:
            raise ApiError(503, f"the model cannot be loaded: {error}", code="not_loaded") from None
    return await handler(request)


async def _engine(app: web.Application) -> AsyncIterator[None]:
    yield
    serving = app[SERVING]
    await asyncio.wait([serving.loading])
    if serving.loaded:
        serving.service.engine.close()


def make_app(serving: Serving) -> web.Application:
    """The application; closing it closes the service's engine."""
    app = web.Application(
        middlewares=[errors, _authenticate, _wait_until_loaded],
        client_max_size=serving.config.max_body_bytes,
    )
    app[SERVING] = serving
    for group in (chat, completions, experts, health, models):
        app.add_routes(group.routes)
    app.cleanup_ctx.append(_engine)
    return app
