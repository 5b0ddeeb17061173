"""The commands that README.md shows are ones that the programs take."""

import argparse
import importlib
import re
import shlex
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from emberd.compile import cli as emberc
from emberd.daemon import cli as emberd
from emberd.daemon.config import Config

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
LINES = re.findall(r"^ {4}((?:emberc|emberd|make) .*?)(?:\s+#.*)?$", README, re.MULTILINE)


def test_readme_shows_every_step_of_the_road() -> None:
    shown = {tuple(shlex.split(line)[:2]) for line in LINES}
    road = [("emberc", command) for command in ("inspect", "convert", "build", "verify")]
    assert shown >= {*road, ("emberd", "serve"), ("emberd", "chat"), ("make", "demo")}


@pytest.mark.parametrize("line", LINES)
def test_command_is_taken(line: str) -> None:
    program, command, *rest = shlex.split(line)
    if program == "emberd":
        emberd._parser().parse_args([command, *rest])
    elif program == "emberc":
        parser = argparse.ArgumentParser()
        importlib.import_module(emberc.COMMANDS[command][0]).add_arguments(parser)
        parser.parse_args(rest)
    else:
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert command in targets


def test_what_commands_write_beside_the_sources_is_ignored_by_git() -> None:
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    options = ("-o", "--trace", "--train")
    words = [shlex.split(line) for line in LINES if line.startswith("emberc")]
    written = {b for line in words for a, b in pairwise(line) if a in options}
    assert {"artifact", "trace", "lstm.onnx"} <= written
    for name in written:
        rules = {f"/{name}", f"/{name}/", f"/{name.partition('/')[0]}/"}
        assert rules & set(ignored), name


def test_settings_and_their_defaults_are_those_of_the_daemon() -> None:
    start = README.index("    host:")
    block = README[start : README.index("\n\n", start)]
    assert yaml.safe_load(block) == asdict(Config())


@pytest.mark.parametrize("folder", re.findall(r"^\| (\S+)/ \|", README, re.MULTILINE))
def test_folder_of_the_layout_is_there(folder: str) -> None:
    assert (ROOT / folder).is_dir()
