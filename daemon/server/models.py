"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from typing import Any

from aiohttp import web
from emberd.daemon.server.api_error import ApiError
from emberd.daemon.server.keys import SERVING
from emberd.daemon.server.service import Service

routes = web.RouteTableDef()


def _model(service: Service) -> dict[str, Any]:
    return {
        "id": service.name,
        "object": "model",
        "created": service.created,
        "owned_by": "emberd",
        "context_length": service.engine.context,
    }


@routes.get("/v1/models")
async def models(request: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [_model(request.app[SERVING].service)]})


@routes.get("/v1/models/{name:.+}")
async def model(request: web.Request) -> web.Response:
    service, name = request.app[SERVING].service, request.match_info["name"]
    if name != service.name:
        raise ApiError(
            404, f"the model {name!r:.80} does not exist", param="model", code="model_not_found"
        )
    return web.json_response(_model(service))
