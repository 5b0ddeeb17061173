"""The HTTP application: a model's service and its routes."""

from __future__ import annotations

import hmac
from collections.abc import AsyncIterator

from aiohttp import web
from aiohttp.typedefs import Handler
from emberd.daemon.server import chat, completions, health, models
from emberd.daemon.server.errors import ApiError, errors
from emberd.daemon.server.keys import METRICS, SERVICE, Service


@web.middleware
async def _authenticate(request: web.Request, handler: Handler) -> web.StreamResponse:
    key = request.app[SERVICE].config.api_key
    given = request.headers.get("Authorization", "").encode()
    wanted = f"Bearer {key}".encode()
    if key and request.path.startswith("/v1/") and not hmac.compare_digest(given, wanted):
        raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key")
    return await handler(request)


async def _engine(app: web.Application) -> AsyncIterator[None]:
    yield
    app[SERVICE].engine.close()


def make_app(service: Service) -> web.Application:
    """The application; closing it closes the service's engine."""
    app = web.Application(
        middlewares=[errors, _authenticate], client_max_size=service.config.max_body_bytes
    )
    app[SERVICE] = service
    app[METRICS] = service.engine.metrics
    for group in (chat, completions, health, models):
        app.add_routes(group.routes)
    app.cleanup_ctx.append(_engine)
    return app
