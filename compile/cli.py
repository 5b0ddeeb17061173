"""`emberc`: the compiler's command line.

Every command is a module with `add_arguments(parser)` and `run(arguments)`, imported only when it
is the one asked for.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from emberd.daemon.errors import EmberdError
from emberd.daemon.version import VersionAction

COMMANDS = {
    "inspect": ("emberd.compile.inspect", "describe a checkpoint from its headers"),
    "plan": ("emberd.compile.plan", "estimate how a model would run on a device"),
    "convert": ("emberd.compile.convert", "turn a checkpoint into ONNX blocks and references"),
    "build": ("emberd.compile.build", "compile a checkpoint or converted model for a target"),
    "profile": ("emberd.compile.profile", "count which experts typical commands choose"),
    "simulate": ("emberd.compile.simulate", "replay a trace against residency policies"),
    "stalls": ("emberd.compile.stalls", "measure what waiting less for experts costs in accuracy"),
    "predict": ("emberd.compile.predict.command", "compare predictors of which experts come next"),
    "run": ("emberd.compile.run", "feed token ids to an artifact or converted model"),
    "verify": ("emberd.compile.verify", "compare an artifact with its converted model"),
    "bench": ("emberd.compile.bench", "measure how fast an artifact runs on this machine"),
}

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status (argparse itself exits for --help and misuse).

    Without a command it is an error, and the help tells which there are.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = _parser()
    if not given:
        parser.print_help(sys.stderr)
        return EXIT_ERROR
    command = parser.parse_args(given[:1]).command
    try:
        module = importlib.import_module(COMMANDS[command][0])
    except ModuleNotFoundError as error:
        print(
            f"emberc: error: the compiler is not installed ({error.name} is missing): "
            "in a clone of emberd, pip install '.[compile]'",
            file=sys.stderr,
        )
        return EXIT_ERROR
    command_parser = _CommandParser(
        prog=f"emberc {command}", description=_sentence(COMMANDS[command][1])
    )
    module.add_arguments(command_parser)
    parsed = command_parser.parse_args(given[1:])
    try:
        module.run(parsed)
        sys.stdout.flush()
    except EmberdError as error:
        print(f"emberc: error: {error}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader has gone; keep the interpreter from flushing into the pipe once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


class _CommandParser(argparse.ArgumentParser):
    """Where an option lacks its argument, says how to give one that looks like an option."""

    def error(self, message: str) -> NoReturn:
        if message.endswith("expected one argument"):
            message += "; one that begins with - is given as in --option=-5"
        super().error(message)


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    lines = "\n".join(f"  {name:<{width}}  {summary}" for name, (_, summary) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="emberc",
        description="Compile mixture-of-experts language models for small devices.",
        epilog=f"commands:\n{lines}\n\n`emberc COMMAND --help` tells what a command takes.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=VersionAction)
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="one of those below")
    return parser


def _sentence(summary: str) -> str:
    return f"{summary[0].upper()}{summary[1:]}."
