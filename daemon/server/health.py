"""GET /health and GET /metrics."""

from __future__ import annotations

from aiohttp import web
from emberd.daemon.engine import Load
from emberd.daemon.metrics import open_files, resident_bytes
from emberd.daemon.server.keys import SERVING

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

routes = web.RouteTableDef()


@routes.get("/health")
async def health(request: web.Request) -> web.Response:
    serving = request.app[SERVING]
    if not serving.loaded:
        return web.json_response({"status": "loading"}, status=503)
    service = serving.service
    load = service.engine.load
    return web.json_response(
        {
            "status": "draining" if service.draining else "ok",
            "model": service.name,
            "model_loaded": load.loaded,
            "slots": {"total": load.slots, "busy": load.busy},
            "queue": {"length": load.queued, "limit": load.max_queue},
        }
    )


@routes.get("/metrics")
async def metrics(request: web.Request) -> web.Response:
    serving = request.app[SERVING]
    residency = serving.service.residency if serving.loaded else None
    gauges = _gauges(serving.service.engine.load) if serving.loaded else {}
    if residency is not None and residency.budget is not None:
        gauges["emberd_expert_budget_bytes"] = ("Memory for experts.", residency.budget)
    gauges["process_resident_memory_bytes"] = ("Resident memory.", resident_bytes())
    gauges["process_open_fds"] = ("Open file descriptors.", open_files())
    counters = [] if residency is None else residency.counters()
    ledger = [] if residency is None else residency.ledger.by_class()
    classes = [(costs.name, costs.total) for costs in ledger]
    text = serving.metrics.text(gauges, counters, classes)
    return web.Response(text=text, headers={"Content-Type": CONTENT_TYPE})


def _gauges(load: Load) -> dict[str, tuple[str, float]]:
    return {
        "emberd_model_loaded": ("Whether the model is in memory.", int(load.loaded)),
        "emberd_slots": ("Slots.", load.slots),
        "emberd_slots_busy": ("Slots at work.", load.busy),
        "emberd_slot_tokens": ("Tokens held in the slots.", load.tokens),
        "emberd_queue_length": ("Requests waiting for a slot.", load.queued),
        "emberd_queue_limit": ("Requests that may wait.", load.max_queue),
    }
