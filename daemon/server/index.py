"""GET / for whoever looks what is there, and what is said of paths where nothing is."""

from __future__ import annotations

from aiohttp import hdrs, web
from emberd.daemon.server.api_error import ApiError

_ABSENT = {  # of OpenAI's API
    "/v1/embeddings": "embeddings",
    "/v1/moderations": "moderations",
    "/v1/responses": "responses: ask /v1/chat/completions",
}

routes = web.RouteTableDef()


@routes.get("/")
async def index(request: web.Request) -> web.Response:
    """That emberd is running, and every path that it answers."""
    lines = sorted(
        f"{route.method:<4} {route.resource.canonical}\n"
        for route in request.app.router.routes()
        if route.resource is not None and route.method != hdrs.METH_HEAD
    )
    return web.Response(text=f"emberd is running\n\n{''.join(lines)}")


def not_found(path: str) -> ApiError:
    """The answer for a path that no route has. Never 501: after a status of 500 or more, OpenAI's
    clients ask again."""
    if path in _ABSENT:
        return ApiError(404, f"emberd has no {_ABSENT[path]}", code="not_supported")
    return ApiError(404, f"there is no {path!r:.80}; GET / lists what there is", code="not_found")
