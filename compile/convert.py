"""Convert a checkpoint: write its structure as ONNX blocks and refer to its weights in place."""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from emberd.compile.blocks import BLOCKS
from emberd.compile.checkpoint.huggingface import (
    GENERATION_CONFIG_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    Checkpoint,
)
from emberd.compile.checkpoint.stop_tokens import find_stop_tokens
from emberd.compile.converted import (
    BLOCK_FOLDER,
    FORMAT,
    MODEL_FILE,
    VERSION,
    BlockInstance,
    ConvertedModel,
)
from emberd.compile.document import read_json
from emberd.compile.weights import Shard, WeightReader, WeightReference
from emberd.daemon.errors import EmberdError
from tqdm import tqdm

CHAT_TEMPLATE_FILE = "chat_template.jinja"
COPIED_FILES = (TOKENIZER_FILE, TOKENIZER_CONFIG_FILE, GENERATION_CONFIG_FILE, CHAT_TEMPLATE_FILE)

Progress = Callable[[int], None]
"""Told how many bytes of weights have just been checked."""

_Dumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


def convert(
    source: Path | str,
    destination: Path | str,
    name: str | None = None,
    progress: Progress = lambda _: None,
) -> ConvertedModel:
    """Convert the Hugging Face checkpoint folder `source` into the new folder `destination`.

    Every weight is read once, in pieces of a few MB, to make sure that it is finite; none is
    copied: `destination` refers to the shards by path relative to itself. `destination` must not
    exist (or be an empty folder); it appears complete or not at all, and what a killed conversion
    left beside it is removed. `name` defaults to the name of the source folder. Raises EmberdError.
    """
    checkpoint = Checkpoint.open(source)
    check_weights(checkpoint.stack(), checkpoint.shards, progress)
    return convert_structure(checkpoint, destination, name)


def convert_structure(
    checkpoint: Checkpoint, destination: Path | str, name: str | None = None
) -> ConvertedModel:
    """`convert` from the headers alone: whether the weights are sound is not looked at."""
    destination = Path(destination).absolute()
    stack = checkpoint.stack()
    _refuse_existing(destination)
    partial = destination.with_name(f".{destination.name}.partial-{os.getpid()}")
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(destination)
        partial.mkdir()
        try:
            model_name = name or checkpoint.folder.resolve().name
            _write(checkpoint, stack, model_name, partial, destination)
            ConvertedModel.load(partial)
            partial.rename(destination)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    except OSError as error:
        raise EmberdError(f"{destination}: cannot be written: {error.strerror}") from error
    return ConvertedModel.load(destination)


def check_weights(
    stack: list[BlockInstance], shards: dict[str, Shard], progress: Progress = lambda _: None
) -> None:
    """Raise EmberdError at the first weight that holds a NaN, an infinity or a huge number."""
    reader = WeightReader(shards)
    try:
        for instance in stack:
            for reference in instance.weights.values():
                reader.check_magnitudes(reference)
                progress(reference.bytes)
    finally:
        reader.close()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, help="a Hugging Face checkpoint folder")
    parser.add_argument("-o", "--output", type=Path, required=True, help="converted model to write")
    parser.add_argument("--name", help="the model's name (default: that of the source folder)")


def run(arguments: argparse.Namespace) -> None:
    total = sum(shard.bytes for shard in Checkpoint.open(arguments.source).shards.values())
    with tqdm(
        total=total, unit="B", unit_scale=True, desc="checking weights", disable=None, leave=False
    ) as bar:
        model = convert(arguments.source, arguments.output, arguments.name, bar.update)
    print(f"{model.name}: converted to {arguments.output}")


def _refuse_existing(destination: Path) -> None:
    if destination.is_dir() and not any(destination.iterdir()):
        return
    if destination.exists() or destination.is_symlink():
        raise EmberdError(f"{destination}: already exists; remove it or choose another place")


def _remove_abandoned(destination: Path) -> None:
    """Remove what conversions to `destination` left that were killed."""
    prefix = f".{destination.name}.partial-"
    for folder in destination.parent.iterdir():
        process = folder.name.removeprefix(prefix)
        if process != folder.name and process.isdigit() and not _is_running(int(process)):
            shutil.rmtree(folder, ignore_errors=True)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # of another user
        return True
    return True


def _write(
    checkpoint: Checkpoint,
    stack: list[BlockInstance],
    name: str,
    folder: Path,
    destination: Path,
) -> None:
    """Fill `folder`, which will be renamed to its sibling `destination`."""
    (folder / BLOCK_FOLDER).mkdir()
    for block in dict.fromkeys(instance.block for instance in stack):
        model = BLOCKS[block].build(checkpoint.configuration.dimensions)
        (folder / BLOCK_FOLDER / f"{block}.onnx").write_bytes(model.SerializeToString())
    for file in COPIED_FILES:
        if (checkpoint.folder / file).is_file():
            shutil.copyfile(checkpoint.folder / file, folder / file)
    _write_embedded_chat_template(checkpoint.folder, folder)
    document = _document(checkpoint, stack, name, destination)
    text = yaml.dump(document, Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=1000)
    (folder / MODEL_FILE).write_text(text, encoding="utf-8")


def _write_embedded_chat_template(source: Path, folder: Path) -> None:
    """Older checkpoints keep the chat template inside tokenizer_config.json."""
    if (source / CHAT_TEMPLATE_FILE).is_file() or not (source / TOKENIZER_CONFIG_FILE).is_file():
        return
    template = read_json(source / TOKENIZER_CONFIG_FILE).get("chat_template")
    if template is not None:
        (folder / CHAT_TEMPLATE_FILE).write_text(template.text(), encoding="utf-8")


def _document(
    checkpoint: Checkpoint, stack: list[BlockInstance], name: str, destination: Path
) -> dict[str, Any]:
    """The content of model.yaml."""
    configuration = checkpoint.configuration
    dimensions = {k: v for k, v in asdict(configuration.dimensions).items() if v is not None}
    return {
        "format": FORMAT,
        "version": VERSION,
        "name": name,
        "architecture": configuration.architecture,
        "dimensions": dimensions,
        "tied_embeddings": checkpoint.tied,
        "stop_tokens": find_stop_tokens(checkpoint),
        "shards": {
            key: {
                "path": os.path.relpath(shard.path.resolve(), destination.parent.resolve() / "_"),
                "bytes": shard.bytes,
            }
            for key, shard in checkpoint.shards.items()
        },
        "stack": [_instance(instance) for instance in stack],
    }


def _instance(instance: BlockInstance) -> dict[str, Any]:
    layer = {} if instance.layer is None else {"layer": instance.layer}
    weights = {name: _reference(reference) for name, reference in instance.weights.items()}
    return {"block": instance.block, **layer, "weights": weights}


def _reference(reference: WeightReference) -> dict[str, Any]:
    tensor = {"name": reference.name, "dtype": reference.dtype, "shape": list(reference.shape)}
    pieces = [{"shard": piece.shard, "offset": piece.offset} for piece in reference.pieces]
    return {**tensor, **pieces[0]} if len(pieces) == 1 else {**tensor, "pieces": pieces}
