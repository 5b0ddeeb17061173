"""The command `emberd`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from pathlib import Path

from emberd.daemon.errors import EmberdError


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0, or 2 after one line on stderr that says what was wrong."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(format="emberd: %(message)s", level=logging.WARNING)
    try:
        run = {"serve": _serve, "check": _check, "chat": _chat}[options.command]
        run(options)
    except EmberdError as error:
        print(f"emberd: error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # whoever read the output has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="emberd", description="Serve a compiled model locally.")
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="answer OpenAI's API over HTTP")
    serve.add_argument("artifact", type=Path, help="what emberc build wrote")
    serve.add_argument("--host", help="address to listen on (default 127.0.0.1)")
    serve.add_argument("--port", type=int, help="port to listen on (default 8080)")
    serve.add_argument("--config", type=Path, help="YAML file of settings")
    check = commands.add_parser("check", help="verify every hash of an artifact")
    check.add_argument("artifact", type=Path)
    chat = commands.add_parser("chat", help="talk to a running daemon")
    chat.add_argument("--url", default="http://127.0.0.1:8080", help="of the daemon")
    chat.add_argument("--model", help="model to ask (default: the one served)")
    chat.add_argument("--system", help="system message")
    chat.add_argument("--api-key", help="the daemon's api_key, if it has one")
    return parser


def _serve(options: argparse.Namespace) -> None:
    from emberd.daemon import config
    from emberd.daemon.server import run

    settings = config.load(options.config, {"host": options.host, "port": options.port})
    asyncio.run(run.serve(run.load_service(options.artifact, settings)))


def _check(options: argparse.Namespace) -> None:
    from emberd.daemon.artifact import Artifact

    artifact = Artifact.open(options.artifact)
    artifact.verify_weights()
    print(f"{options.artifact}: {artifact.model.name}, every file is as built")


def _chat(options: argparse.Namespace) -> None:
    from emberd.daemon.chat import talk

    asyncio.run(talk(options.url, options.model, options.system, options.api_key))


if __name__ == "__main__":
    sys.exit(main())
