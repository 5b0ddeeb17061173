"""GET /health and GET /metrics."""

from __future__ import annotations

from aiohttp import web
from emberd.daemon.metrics import resident_bytes
from emberd.daemon.server.keys import METRICS, SERVICE

routes = web.RouteTableDef()


@routes.get("/health")
async def health(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    load = service.engine.load
    return web.json_response(
        {
            "status": "draining" if service.draining else "ok",
            "model": service.name,
            "slots": {"total": load.slots, "busy": load.busy},
            "queue": {"length": load.queued, "limit": load.max_queue},
        }
    )


@routes.get("/metrics")
async def metrics(request: web.Request) -> web.Response:
    load = request.app[SERVICE].engine.load
    text = request.app[METRICS].text(
        {
            "emberd_slots": ("Slots.", lambda: load.slots),
            "emberd_slots_busy": ("Slots at work.", lambda: load.busy),
            "emberd_queue_length": ("Requests waiting for a slot.", lambda: load.queued),
            "process_resident_memory_bytes": ("Resident memory.", resident_bytes),
        }
    )
    return web.Response(text=text, headers={"Content-Type": "text/plain; version=0.0.4"})
