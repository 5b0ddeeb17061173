"""Serving an artifact until a signal, then draining."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, replace
from typing import Any

from aiohttp import web
from emberd.daemon.config import Config
from emberd.daemon.errors import EmberdError
from emberd.daemon.metrics import Metrics
from emberd.daemon.server.app import make_app
from emberd.daemon.server.keys import SERVING, Serving
from emberd.daemon.server.service import Service, expert_budget, shortcuts
from emberd.daemon.server.systemd import notify_ready, passed_socket

RELOADED = ("expert_budget", "routing_margin", "stall_deadline", "stall_weight")  # by SIGHUP
LEAST_STEP_SECONDS = 3.0  # that the last step may take when the daemon ends
FIRST_REQUEST_SECONDS = 0.1  # in which a connection that was just taken asks something
KEEPALIVE_SECONDS = 75.0  # a connection without a request is closed after it

log = logging.getLogger("emberd")


async def serve(
    config: Config,
    metrics: Metrics,
    loading: Future[Service],
    reload: Callable[[], Config] | None,
) -> None:
    """Listen until SIGTERM or SIGINT, then finish what runs; a second signal exits at once.

    Connections are taken from the start, and answered once the service is loaded. SIGHUP reads the
    configuration again, by ``reload`` (None: there is no file of it), and changes what can be
    changed while serving. Raises EmberdError where loading fails, or where nobody can listen.
    """
    metrics.reached("imported")
    # It would log a traceback for every malformed request; what our handlers raise, we log.
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
    app = make_app(Serving(config, metrics, asyncio.wrap_future(loading)))
    runner = web.AppRunner(
        app,
        handler_cancellation=True,
        shutdown_timeout=1.0,
        keepalive_timeout=KEEPALIVE_SECONDS,
        access_log=None,
    )
    await runner.setup()
    try:
        passed = passed_socket()
        site = await _listen(runner, config, passed)
        metrics.reached("listening")
        service = await app[SERVING].loading
    except EmberdError:
        await runner.cleanup()
        raise
    metrics.reached("ready")
    gc.freeze()  # what was imported stays: the first request need not wait until it is looked at
    gc.enable()
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            os._exit(130)
        stop.set()

    reloads: set[asyncio.Task[None]] = set()

    async def again() -> None:
        await asyncio.to_thread(take_reload, service, reload)

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    loop.add_signal_handler(signal.SIGHUP, lambda: reloads.add(asyncio.create_task(again())))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})  # and take what came while starting
    print(f"emberd: {service.name} on {_url(runner.addresses[0])}", flush=True)
    notify_ready()
    await stop.wait()
    if passed is not None:
        await _leave(passed)
    service.draining = True
    await site.stop()
    await _drain(service)
    await _close(service)
    await runner.cleanup()


def take_reload(service: Service, reload: Callable[[], Config] | None) -> None:
    """Takes the settings in RELOADED of a changed configuration, or none of them where one is
    refused; what else changed waits for a restart."""
    if reload is None:
        log.warning("nothing was reloaded: emberd was started without --config")
        return
    try:
        config = reload()
        if service.residency is not None:
            service.residency.change(expert_budget(config), shortcuts(config))
    except EmberdError as error:
        log.error("the configuration was not reloaded: %s", error)
        return
    except Exception:  # or it would vanish with the task
        log.exception("the configuration was not reloaded")
        return
    before = asdict(service.config)
    changed = {name: value for name, value in asdict(config).items() if value != before[name]}
    if waiting := [name for name in changed if name not in RELOADED]:
        log.warning("only a restart changes %s", ", ".join(waiting))
    taken = {name: value for name, value in changed.items() if name in RELOADED}
    service.config = replace(service.config, **taken)
    news = ", ".join(f"{name} is {value}" for name, value in taken.items())
    log.warning("the configuration was reloaded: %s", news or "nothing changed")


async def _close(service: Service) -> None:
    """What still runs ends with an error, after the step that it is at. If that takes longer than
    requests had to end, as when the disk has stopped, the process ends all the same."""
    closing = asyncio.create_task(asyncio.to_thread(service.engine.close))
    patience = max(service.config.drain_seconds, LEAST_STEP_SECONDS)
    done, _ = await asyncio.wait([closing], timeout=patience)
    if not done:
        log.error("a step does not end, its disk may have stopped: leaving it")
        os._exit(1)
    await closing


async def _listen(
    runner: web.AppRunner, config: Config, passed: socket.socket | None
) -> web.BaseSite:
    """On the socket that systemd passed, else where the settings say."""
    if passed is not None:
        site: web.BaseSite = web.SockSite(runner, passed)
    else:
        site = web.TCPSite(runner, config.host, config.port, backlog=512)
    try:
        await site.start()
    except (OSError, UnicodeError) as error:  # UnicodeError: what cannot be a host name
        number = error.errno if isinstance(error, OSError) else None
        # asyncio wraps the reason of errno in text of its own; a resolver's numbers are negative.
        reason = os.strerror(number) if number and number > 0 else error
        where = f"{config.host:.80}:{config.port}"
        raise EmberdError(f"cannot listen on {where}: {reason}") from None
    return site


async def _leave(passed: socket.socket) -> None:
    """Leaves connections to the next daemon, but for those that were taken: who waits there is
    still served. Closing the socket at once would reset those that were taken just before."""
    asyncio.get_running_loop().remove_reader(passed)
    await asyncio.sleep(FIRST_REQUEST_SECONDS)


def _url(address: Any) -> str:
    """Of a socket's address: (host, port, ...), or the path of a Unix socket."""
    if isinstance(address, str):
        return f"unix:{address}"
    host, port = address[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def _drain(service: Service) -> None:
    deadline = time.monotonic() + service.config.drain_seconds
    log.warning("shutting down, with %d requests to finish", _unfinished(service))
    while unfinished := _unfinished(service):
        if time.monotonic() > deadline:
            log.warning("gave up waiting for %d requests", unfinished)
            return
        await asyncio.sleep(0.02)


def _unfinished(service: Service) -> int:
    load = service.engine.load
    return load.busy + load.queued
