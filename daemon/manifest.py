"""The manifest of an artifact: what the artifact is, and size and hash of each of its files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from emberd.daemon.errors import EmberdError
from emberd.daemon.program import INT64_MAX, integer

FORMAT = "emberd-artifact"
VERSION = 1
ABI = 1
MANIFEST = "manifest.json"
PROGRAM = "program.msgpack"
WEIGHTS = "weights.bin"
EXPERTS = "experts.bin"
LARGE = (WEIGHTS, EXPERTS)  # mapped; every other file is read whole


@dataclass(frozen=True)
class ModelDescription:
    """What the manifest says about the model; `details` is free-form (parameter counts, ...)."""

    name: str
    architecture: str
    vocab_size: int
    hidden_size: int
    layers: int
    max_context: int
    stop_tokens: tuple[int, ...]
    recipe: str
    details: Mapping[str, Any]

    @classmethod
    def from_json(cls, value: Any) -> ModelDescription:
        """Checks the manifest's "model"; EmberdError names the field that is wrong."""
        fields = dict(_mapping(value, "model"))
        for key in ("name", "architecture", "recipe"):
            if not isinstance(fields.get(key), str):
                raise EmberdError(f"manifest: model.{key} is not a string")
        for key in ("vocab_size", "hidden_size", "layers", "max_context"):
            integer(fields.get(key), f"manifest: model.{key}", 1, 2**31 - 1)
        stop, last = fields.get("stop_tokens"), fields["vocab_size"] - 1
        if not isinstance(stop, list):
            raise EmberdError("manifest: model.stop_tokens is not a list")
        fields["stop_tokens"] = tuple(
            integer(token, "manifest: a stop token", 0, last) for token in stop
        )
        fields["details"] = _mapping(fields.get("details"), "model.details")
        known = cls.__dataclass_fields__
        if unknown := sorted(set(fields) - set(known)):
            raise EmberdError(f"manifest: unknown model fields {unknown}")
        return cls(**fields)


@dataclass(frozen=True)
class KernelVariant:
    """One kernel library: its ISA level and the CPU features that it needs."""

    isa: str
    file: str
    cpu_features: tuple[str, ...]


@dataclass(frozen=True)
class FileEntry:
    """Size and BLAKE2b-256 (hex) of a file."""

    bytes: int
    blake2b: str


@dataclass(frozen=True)
class Manifest:
    """manifest.json. `kernels`: best first; `files`: every other file of the artifact, by name."""

    model: ModelDescription
    target: str
    kernels: tuple[KernelVariant, ...]
    files: Mapping[str, FileEntry]

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Reads manifest.json; EmberdError says what is not as it must be."""
        try:
            top = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise EmberdError(f"{MANIFEST} is not JSON: {error}") from None
        top = _mapping(top, "the top level")
        if top.get("format") != FORMAT:
            raise EmberdError(f"{MANIFEST}: format {top.get('format')!r:.80}, expected {FORMAT!r}")
        for key, expected in (("version", VERSION), ("abi", ABI)):
            if top.get(key) != expected:
                raise EmberdError(
                    f"artifact {key} {top.get(key)!r:.80}, this emberd reads {expected}: "
                    "rebuild it with a matching emberc"
                )
        files = _files(top.get("files"))
        return cls(
            model=ModelDescription.from_json(top.get("model")),
            target=_string(top.get("target"), "target"),
            kernels=_kernels(top.get("kernels"), files),
            files=files,
        )

    def to_bytes(self) -> bytes:
        """manifest.json; equal manifests give equal bytes."""
        top = {"format": FORMAT, "version": VERSION, "abi": ABI, **asdict(self)}
        return (json.dumps(top, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def check_name(name: str) -> None:
    """File names are plain: nothing in an artifact points outside of it."""
    if not name or name.startswith(".") or "/" in name or "\0" in name:
        raise EmberdError(f"{name!r:.80} is not a plain file name")


def _files(value: Any) -> dict[str, FileEntry]:
    files = {}
    for name, entry in _mapping(value, "files").items():
        check_name(name)
        fields = _mapping(entry, f"files.{name}")
        size = integer(fields.get("bytes"), f"manifest: size of {name}", 0, INT64_MAX)
        files[name] = FileEntry(size, _string(fields.get("blake2b"), f"hash of {name}"))
    for name in (PROGRAM, *LARGE):
        if name not in files:
            raise EmberdError(f"the manifest lists no {name}")
    return files


def _kernels(value: Any, files: Mapping[str, FileEntry]) -> tuple[KernelVariant, ...]:
    if not isinstance(value, list) or not value:
        raise EmberdError("manifest: kernels is not a list of variants")
    variants = []
    for entry in value:
        fields = _mapping(entry, "kernels")
        features = fields.get("cpu_features")
        if not isinstance(features, list):
            raise EmberdError("manifest: cpu_features is not a list")
        variant = KernelVariant(
            _string(fields.get("isa"), "isa"),
            _string(fields.get("file"), "kernel file"),
            tuple(_string(feature, "a CPU feature") for feature in features),
        )
        if variant.file not in files or variant.file in LARGE:
            raise EmberdError(f"manifest: kernel file {variant.file!r:.80} is not listed")
        variants.append(variant)
    return tuple(variants)


def _mapping(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise EmberdError(f"manifest: {what} is not a map")
    return value


def _string(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise EmberdError(f"manifest: {what} is not a string")
    return value
