"""What the application carries."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from aiohttp import web
from emberd.daemon.config import Config
from emberd.daemon.metrics import Metrics
from emberd.daemon.server.service import Service


@dataclass
class Serving:
    """What is served, while it is being loaded and after."""

    config: Config
    metrics: Metrics
    loading: asyncio.Future[Service]

    @property
    def service(self) -> Service:
        """Of handlers under /v1/, which run only once it is loaded."""
        return self.loading.result()

    @property
    def loaded(self) -> bool:
        return self.loading.done() and not self.loading.cancelled() and not self.loading.exception()


SERVING = web.AppKey("serving", Serving)
