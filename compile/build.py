"""`emberc build`: a checkpoint or converted model becomes an artifact for a target."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from emberd.compile.convert import convert
from emberd.compile.converted import MODEL_FILE, ConvertedModel
from emberd.compile.isa.isa import ISAS, host_isas
from emberd.compile.package import write_artifact
from emberd.compile.pipeline import OPTIONAL_PASSES, check_optional, compile_blocks
from emberd.compile.predict.network import TrainedNetwork, read_network
from emberd.compile.quantize.formats import FORMATS
from emberd.compile.quantize.recipes import RECIPES, Recipe
from emberd.compile.texts import text_files
from emberd.daemon.activation_map import ActivationMap
from emberd.daemon.artifact_writer import check_replaceable
from emberd.daemon.errors import EmberdError
from emberd.daemon.policies import POLICIES
from emberd.targets.registry import HOST, UnknownTargetError, find_target
from tqdm import tqdm

CHUNK_SIZES = (1, 32, 512)
"""Tokens of a step. The scratch memory of a short one is compact: a first token touches little."""


def build(
    source: Path,
    destination: Path,
    target: str,
    recipe: str,
    dump: Path | None = None,
    chunk_sizes: Sequence[int] = CHUNK_SIZES,
    name: str | None = None,
    disabled: Collection[str] = (),
    activation_map: Path | None = None,
    predictor: Path | None = None,
) -> list[str]:
    """Build an artifact; returns what the passes did, a line each.

    `target` "host" compiles for the best instruction set of this machine only; a named target for
    all of its instruction sets. `disabled` names optional passes to leave out; `activation_map` a
    file by which to order experts.bin; `predictor` that of a network which says what tokens will
    choose, to be compiled likewise. Raises EmberdError; nothing is then left at `destination`.
    """
    check_optional(disabled)
    try:
        found = find_target(target)
    except UnknownTargetError as error:
        raise EmberdError(str(error)) from None
    isas = host_isas()[:1] if target == HOST else [ISAS[name] for name in found.isas]
    if POLICIES[found.expert_policy].needs_predictor == "tokens" and predictor is None:
        raise EmberdError(
            f"target {found.name} has the policy {found.expert_policy}, which needs a predictor: "
            "give --predictor"
        )
    check_replaceable(destination)
    with _reported(), tempfile.TemporaryDirectory() as temporary:
        folder = source
        if not (source / MODEL_FILE).is_file():
            folder = Path(temporary) / "converted"
            convert(source, folder, name=name or source.resolve().name)
        elif name is not None:
            raise EmberdError(f"{source} is a converted model and keeps its name: leave out --name")
        model = ConvertedModel.load(folder)
        _check_formats(model, RECIPES[recipe])
        texts = text_files(model.folder)
        found_map = None if activation_map is None else _read_map(activation_map, model)
        network = None if predictor is None else _read_predictor(predictor, model)
        with tqdm(desc="build", unit=" steps", disable=not sys.stderr.isatty()) as bar:

            def progress(label: str) -> None:
                bar.set_postfix_str(label)
                bar.update()

            compiled = compile_blocks(
                model,
                RECIPES[recipe],
                isas[0],
                list(chunk_sizes),
                disabled=disabled,
                dump=dump,
                progress=progress,
            )
            write_artifact(
                destination,
                model,
                RECIPES[recipe],
                found,
                isas,
                compiled,
                texts,
                progress,
                found_map,
                network,
            )
    return compiled.report


@contextmanager
def _reported() -> Iterator[None]:
    """Turns an OSError, of a temporary or a dumped file, into an EmberdError that names it."""
    try:
        yield
    except OSError as error:
        raise EmberdError(f"{error.filename or 'temporary files'}: {error.strerror}") from error


def _read_map(path: Path, model: ConvertedModel) -> ActivationMap:
    """Raises EmberdError before any work where the map cannot be of the model."""
    found = ActivationMap.read(path)
    _check_shape(path, (found.layers, found.experts, found.top_k), model)
    return found


def _read_predictor(path: Path, model: ConvertedModel) -> TrainedNetwork:
    """Raises EmberdError before any work where the network cannot be of the model."""
    found = read_network(path)
    _check_shape(path, found.shape, model)
    return found


def _check_shape(path: Path, made_for: tuple[int, int, int], model: ConvertedModel) -> None:
    """Of layers, experts of each, top_k. Raises EmberdError."""
    dimensions = model.dimensions
    shape = dimensions.layers, dimensions.moe.experts, dimensions.moe.top_k
    if made_for != shape:
        raise EmberdError(
            f"{path}: made for {made_for[0]} layers of {made_for[1]} experts, {made_for[2]} "
            f"of them a token; this model has {shape[0]} of {shape[1]}, {shape[2]} a token"
        )


def _check_formats(model: ConvertedModel, recipe: Recipe) -> None:
    """Refuse before any work what a format cannot take. Raises EmberdError."""
    for instance in model.stack:
        for name, reference in instance.weights.items():
            rows, columns = reference.shape[-2:] if len(reference.shape) > 1 else (1, 1)
            try:
                FORMATS[recipe.format_of(instance.block, name)].check(rows, columns)
            except EmberdError as error:
                raise EmberdError(f"{reference.name}: {error}") from None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, help="checkpoint folder, or a converted model")
    parser.add_argument("-o", "--output", type=Path, required=True, help="artifact to write")
    parser.add_argument("--target", default=HOST, help="target name, or host (this machine)")
    parser.add_argument("--recipe", choices=RECIPES, default="q4", help="formats of the weights")
    parser.add_argument(
        "--name", help="of the model when SOURCE is a checkpoint (default: its folder)"
    )
    parser.add_argument(
        "--disable",
        metavar="PASS",
        action="append",
        default=[],
        help=f"leave out an optional pass; may be repeated: {', '.join(OPTIONAL_PASSES)}",
    )
    parser.add_argument(
        "--map",
        type=Path,
        help="activation map of this model (emberc profile): orders experts.bin, and is shipped",
    )
    parser.add_argument(
        "--predictor",
        type=Path,
        metavar="FILE.onnx",
        help="network that emberc profile --train wrote for this model: compiled, and shipped for "
        "the policies that need one",
    )
    parser.add_argument("--dump", type=Path, help="write the IR after each phase to this folder")


def run(arguments: argparse.Namespace) -> None:
    lines = build(
        arguments.source,
        arguments.output,
        arguments.target,
        arguments.recipe,
        arguments.dump,
        name=arguments.name,
        disabled=arguments.disable,
        activation_map=arguments.map,
        predictor=arguments.predictor,
    )
    for line in lines:
        print(line)
    print(f"wrote {arguments.output}")
