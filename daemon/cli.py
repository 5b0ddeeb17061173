"""The command `emberd`."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from emberd.daemon.errors import EmberdError
from emberd.daemon.version import VersionAction

if TYPE_CHECKING:
    from emberd.daemon.config import Config

_FAST_LOAD_SECONDS = 0.1


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0; 2 after one line on stderr that says what was wrong, or the help where no
    command is given; 130 after Ctrl-C."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help(sys.stderr)
        return 2
    logging.basicConfig(format="emberd: %(message)s", level=logging.WARNING)
    try:
        run = {"serve": _serve, "check": _check, "chat": _chat}[options.command]
        run(options)
    except EmberdError as error:
        print(f"emberd: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # while starting: a running daemon drains
        return 130
    except BrokenPipeError:  # whoever read the output has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="emberd", description="Serve a compiled model locally.")
    parser.add_argument("--version", action=VersionAction)
    commands = parser.add_subparsers(dest="command", title="commands", metavar="COMMAND")

    def command(name: str, text: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")

    serve = command("serve", "answer OpenAI's API over HTTP")
    serve.add_argument("artifact", type=Path, help="what emberc build wrote")
    serve.add_argument("--host", help="address to listen on (default 127.0.0.1)")
    serve.add_argument("--port", type=int, help="port to listen on (default 8080)")
    serve.add_argument("--config", type=Path, help="YAML file of settings")
    check = command("check", "verify every hash of an artifact")
    check.add_argument("artifact", type=Path, help="what emberc build wrote")
    chat = command("chat", "talk to a running daemon")
    chat.add_argument(
        "--url",
        default="http://127.0.0.1:8080",
        help="of the daemon, with or without /v1 (default %(default)s)",
    )
    chat.add_argument("--model", help="model to ask (default: the one served)")
    chat.add_argument("--system", help="system message")
    chat.add_argument("--api-key", help="the daemon's api_key, if it has one")
    return parser


def _serve(options: argparse.Namespace) -> None:
    """Loads the artifact in a thread, so that the libraries of the server are imported while a slow
    disk is waited for. Where it is fast they come afterwards: two threads that take turns at the
    interpreter lock need longer than one after the other.

    SIGHUP, which would end the process, waits from here until it can be served; what sends one
    earlier has to await readiness first, as systemd does (see emberd.service).
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    from concurrent.futures import ThreadPoolExecutor, wait

    from emberd.daemon import config
    from emberd.daemon.metrics import Metrics

    def read() -> Config:
        return config.load(options.config, {"host": options.host, "port": options.port})

    settings = read()
    metrics = Metrics()
    metrics.reached("configured")
    loader = ThreadPoolExecutor(1, "loader")
    with _without_openssl(), _without_garbage_collection():
        from emberd.daemon.server.service import load_service

        loading = loader.submit(load_service, options.artifact, settings, metrics)
        loader.shutdown(wait=False)
        wait([loading], _FAST_LOAD_SECONDS)
        import asyncio

        from emberd.daemon.server.run import serve

        asyncio.run(serve(settings, metrics, loading, read if options.config else None))


@contextmanager
def _without_openssl() -> Iterator[None]:
    """Keeps libraries from importing OpenSSL, which costs 60 ms and 8 MB: the daemon has no TLS,
    and hashlib has BLAKE2 of its own."""
    hidden = [name for name in ("ssl", "_hashlib") if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None: cannot be imported
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Until the server turns it on: among what is imported there is no garbage to look for."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _check(options: argparse.Namespace) -> None:
    from emberd.daemon.artifact import Artifact

    artifact = Artifact.open(options.artifact)
    artifact.verify_weights()
    print(f"{options.artifact}: {artifact.model.name}, every file is as built")


def _chat(options: argparse.Namespace) -> None:
    import asyncio

    from emberd.daemon.chat import talk

    asyncio.run(talk(options.url, options.model, options.system, options.api_key))


if __name__ == "__main__":
    sys.exit(main())
