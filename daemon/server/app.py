"""The HTTP application: a model's service and its routes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from aiohttp import web
from aiohttp.typedefs import Handler
from emberd.daemon.errors import EmberdError
from emberd.daemon.server import chat, completions, experts, health, index, models
from emberd.daemon.server.access import access
from emberd.daemon.server.api_error import ApiError
from emberd.daemon.server.errors import errors
from emberd.daemon.server.keys import SERVING, Serving


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
        middlewares=[errors, access, _wait_until_loaded],
        client_max_size=serving.config.max_body_bytes,
    )
    app[SERVING] = serving
    for group in (chat, completions, experts, health, index, models):
        app.add_routes(group.routes)
    app.cleanup_ctx.append(_engine)
    return app
