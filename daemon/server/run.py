"""Serving an artifact until a signal, then draining."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from pathlib import Path
from typing import Any

from aiohttp import web
from emberd.daemon.artifact import Artifact
from emberd.daemon.config import Config
from emberd.daemon.core import Model
from emberd.daemon.engine import Engine
from emberd.daemon.errors import EmberdError
from emberd.daemon.prompt import load_template, load_tokenizer, read_json
from emberd.daemon.server.app import make_app
from emberd.daemon.server.fields import Fields
from emberd.daemon.server.keys import Service

KEEPALIVE_SECONDS = 75.0  # a connection without a request is closed after it

log = logging.getLogger("emberd")


def load_service(path: Path, config: Config) -> Service:
    """Load an artifact. Raises EmberdError."""
    artifact = Artifact.open(path)
    generation = read_json(artifact, "generation_config.json")
    tokenizer = load_tokenizer(artifact)
    template = load_template(artifact)
    model = Model(artifact, config.threads or None)
    context = min(config.context or model.max_context, model.max_context)
    engine = Engine(
        model, tokenizer, slots=config.slots, context=context, max_queue=config.max_queue
    )
    return Service(
        name=artifact.model.name,
        engine=engine,
        tokenizer=tokenizer,
        template=template,
        stop_tokens=frozenset(artifact.model.stop_tokens),
        config=config,
        defaults=sampling_defaults(generation),
        created=int((path / "manifest.json").stat().st_mtime),
    )


def sampling_defaults(generation_config: dict[str, Any]) -> dict[str, Any]:
    """The sampling settings of generation_config.json; do_sample false means greedy.

    Raises EmberdError naming the setting that no request may have either.
    """
    fields = Fields(generation_config, "generation_config.json: ")
    defaults = {
        "temperature": fields.number("temperature", 0, 2, None),
        "top_k": fields.integer("top_k", -1, 2**31 - 1, None),  # all of a smaller vocabulary
        "top_p": fields.number("top_p", 0, 1, None),
        "min_p": fields.number("min_p", 0, 1, None),
    }
    if not fields.boolean("do_sample", True):
        defaults["temperature"] = 0.0
    return {name: value for name, value in defaults.items() if value is not None}


async def serve(service: Service) -> None:
    """Listen until SIGTERM or SIGINT, then finish what runs; a second signal exits at once."""
    config = service.config
    # It would log a traceback for every malformed request; what our handlers raise, we log.
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
    app = make_app(service)
    runner = web.AppRunner(
        app,
        handler_cancellation=True,
        shutdown_timeout=1.0,
        keepalive_timeout=KEEPALIVE_SECONDS,
        access_log=None,
    )
    await runner.setup()
    site = web.TCPSite(runner, config.host, config.port, backlog=512)
    try:
        await site.start()
    except (OSError, UnicodeError) as error:  # UnicodeError: what cannot be a host name
        await runner.cleanup()
        number = error.errno if isinstance(error, OSError) else None
        # asyncio wraps the reason of errno in text of its own; a resolver's numbers are negative.
        reason = os.strerror(number) if number and number > 0 else error
        where = f"{config.host:.80}:{config.port}"
        raise EmberdError(f"cannot listen on {where}: {reason}") from None
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            os._exit(130)
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    host, port = runner.addresses[0][:2]
    shown = f"[{host}]" if ":" in host else host
    print(f"emberd: {service.name} on http://{shown}:{port}", flush=True)
    await stop.wait()
    service.draining = True
    await site.stop()
    await _drain(service)
    await asyncio.to_thread(service.engine.close)  # what still runs ends with an error
    await runner.cleanup()


async def _drain(service: Service) -> None:
    deadline = time.monotonic() + service.config.drain_seconds
    log.warning("shutting down: waiting for running requests")
    while (load := service.engine.load).busy or load.queued:
        if time.monotonic() > deadline:
            log.warning("gave up waiting for %d requests", load.busy + load.queued)
            return
        await asyncio.sleep(0.02)
