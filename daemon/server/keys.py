"""What the application carries."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from emberd.daemon.config import Config
from emberd.daemon.engine import Engine
from emberd.daemon.metrics import Metrics
from emberd.daemon.template import ChatTemplate
from emberd.daemon.text import Tokenizer


@dataclass
class Service:
    """A model being served.

    Attributes:
        name: its id in the API.
        template: None where the checkpoint has none: no chat then.
        defaults: sampling defaults of the checkpoint's generation_config.json.
        draining: new requests are refused.
    """

    name: str
    engine: Engine
    tokenizer: Tokenizer
    template: ChatTemplate | None
    stop_tokens: frozenset[int]
    config: Config
    defaults: dict[str, Any] = field(default_factory=dict)
    draining: bool = False
    created: int = 0


SERVICE = web.AppKey("service", Service)
METRICS = web.AppKey("metrics", Metrics)
