"""GET /v1/experts: which experts are in memory, which ones tokens choose, and what they cost.

    {"object": "experts", "model": NAME, "loaded": true,
     "layers": L, "experts": E, "experts_per_token": K, "expert_bytes": n,
     "token_demand_bytes": n,      what one token needs
     "budget_bytes": n | null,     null: all experts are mapped
     "policy": NAME,               of daemon/policies.py; without a map, less what comes from one
     "resident": n,                experts in memory
     "hit_rate": x | null,         of what steps asked the budgeted memory for; null: nothing yet
     "class": NAME | null,         what was asked for
     "classes": [{"name", "prior"}],          of the activation map; empty without one
     "by_layer": [{"layer": i, "resident": [expert, ...],
                   "chosen": [n, ...],        by expert: tokens that chose it since loading
                   "hits", "misses", "skipped", "substituted", "read_bytes", "stall_seconds",
                   "layer_ahead", "layer_ahead_used",
                   "expected": [x, ...]}],    by expert: share of the choices, by the map
     "by_class": [{"class": NAME | null,      null: of no class
                   "hits", "misses", "skipped", "substituted", "read_bytes", "stall_seconds",
                   "layer_ahead", "layer_ahead_used",
                   "layers": [{"hits", ...}]}],   the same eight of each
     "minutes": [{"start": t, "hits", "misses"}]}   Unix time; those in which steps asked for any

`?class=NAME` gives what is expected of that class, else it is of all classes by their priors;
without a map there is no "expected". While the model is unloaded "loaded" is false, and what is
told of the model is not there; so with a model that does not tell about its experts.

Experts are read "layer_ahead" that the layer before expects, if the policy has it so; those of them
that a step asked for since are "layer_ahead_used".

"by_class" and "minutes" go back to the start of the daemon, the others to when the model was
loaded. They lag behind "by_layer" while requests are at work; `Residency` says which class is
meant. There are no more than the last 60 minutes.

GET /v1/experts.html shows the same to people.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from aiohttp import web
from emberd.daemon.activation_map import ActivationMap
from emberd.daemon.errors import EmberdError
from emberd.daemon.expert_ledger import ExpertLedger
from emberd.daemon.protocols import ExpertCountersLike, WatchableExperts
from emberd.daemon.server.api_error import ApiError
from emberd.daemon.server.experts_page import page
from emberd.daemon.server.keys import SERVING

_DIGITS = 5  # of shares: a map's counts hold no more

routes = web.RouteTableDef()


@routes.get("/v1/experts")
async def experts(request: web.Request) -> web.Response:
    return web.json_response(report(request))


@routes.get("/v1/experts.html")
async def experts_page(request: web.Request) -> web.Response:
    """The same as a picture that renews itself."""
    return web.Response(text=page(report(request)), content_type="text/html")


def report(request: web.Request) -> dict[str, Any]:
    """The answer to a request. Raises ApiError for a class that the map has not."""
    service = request.app[SERVING].service
    found = service.activation_map
    name = request.query.get("class")
    index = _class(name, found)
    watched = service.engine.experts
    classes = () if found is None else zip(found.classes, found.priors, strict=True)
    body: dict[str, Any] = {
        "object": "experts",
        "model": service.name,
        "loaded": watched is not None,
        "class": name,
        "classes": [
            {"name": entry.name, "prior": round(prior, _DIGITS)} for entry, prior in classes
        ],
    }
    if watched is not None:
        body |= _watched(watched, found, index)
    if service.residency is not None:
        body["policy"] = service.residency.policy.name
        body |= _counted(service.residency.ledger)
    return body


def _class(name: str | None, found: ActivationMap | None) -> int | None:
    """The index of the class asked for. Raises ApiError for one that the map has not."""
    if name is None:
        return None
    if found is None:
        raise ApiError(400, "this model has no activation map, so no classes", param="class")
    try:
        return found.index(name)
    except EmberdError as error:
        raise ApiError(400, str(error), param="class") from None


def _watched(
    watched: WatchableExperts, found: ActivationMap | None, index: int | None
) -> dict[str, Any]:
    layout, counters = watched.experts, watched.expert_counters()
    resident, chosen = watched.resident_experts(), watched.chosen_experts()
    hits, misses = sum(c.hits for c in counters), sum(c.misses for c in counters)
    by_layer = []
    for layer, cost in enumerate(counters):
        row = slice(layer * layout.experts, (layer + 1) * layout.experts)
        entry: dict[str, Any] = {
            "layer": layer,
            "resident": [expert for expert, there in enumerate(resident[row]) if there],
            "chosen": list(chosen[row]),
            **_costs(cost),
        }
        if found is not None:
            entry["expected"] = [round(share, _DIGITS) for share in found.mass(layer, index)]
        by_layer.append(entry)
    return {
        "layers": layout.layers,
        "experts": layout.experts,
        "experts_per_token": layout.top_k,
        "expert_bytes": layout.expert_bytes,
        "token_demand_bytes": watched.token_demand,
        "budget_bytes": watched.expert_budget,
        "resident": sum(resident),
        "hit_rate": hits / (hits + misses) if hits + misses else None,
        "by_layer": by_layer,
    }


def _counted(ledger: ExpertLedger) -> dict[str, Any]:
    return {
        "by_class": [
            {
                "class": costs.name,
                **_costs(costs.total),
                "layers": [_costs(layer) for layer in costs.layers],
            }
            for costs in ledger.by_class()
        ],
        "minutes": [asdict(minute) for minute in ledger.minutes()],
    }


def _costs(cost: ExpertCountersLike) -> dict[str, Any]:
    return {
        "hits": cost.hits,
        "misses": cost.misses,
        "skipped": cost.skipped,
        "substituted": cost.substituted,
        "read_bytes": cost.bytes,
        "stall_seconds": cost.stall_nanoseconds / 1e9,
        "layer_ahead": cost.expected,
        "layer_ahead_used": cost.expected_used,
    }
