"""The option --version of both commands."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any


class VersionAction(argparse.Action):
    """Prints the program's name and version; reads the package's metadata only when asked."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help="print the version and exit")

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib import metadata

        try:
            version = metadata.version("emberd")
        except metadata.PackageNotFoundError:
            parser.error("emberd runs from a source tree that is not installed: no version known")
        print(f"{parser.prog} {version}")
        parser.exit()
