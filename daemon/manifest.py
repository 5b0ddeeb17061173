"""The manifest of an artifact: what the artifact is, and size and hash of each of its files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from emberd.daemon.errors import EmberdError
from emberd.daemon.record import INT32_MAX, INT64_MAX, Record

FORMAT = "emberd-artifact"
VERSION = 1
ABI = 1
MANIFEST = "manifest.json"
PROGRAM = "program.msgpack"
WEIGHTS = "weights.bin"
EXPERTS = "experts.bin"
PREDICTOR = "predictor"
LARGE = (WEIGHTS, EXPERTS)  # mapped; every other file is read whole


@dataclass(frozen=True)
class ModelDescription:
    """What the manifest says about the model; `details` is free-form (parameter counts, ...).

    `identity`: hex BLAKE2b-256 of the weights as they are stored, in the order of the model: equal
    however the artifact is laid out and whatever it was compiled for. Empty where not known.
    """

    name: str
    architecture: str
    vocab_size: int
    hidden_size: int
    layers: int
    max_context: int
    stop_tokens: tuple[int, ...]
    recipe: str
    details: Mapping[str, Any]
    identity: str = ""

    @classmethod
    def from_record(cls, model: Record) -> ModelDescription:
        """Reads the manifest's "model"; EmberdError names the field that is wrong."""
        if unknown := sorted(set(model.members) - set(cls.__dataclass_fields__)):
            raise EmberdError(f"manifest: unknown model fields {unknown}")
        vocab_size = model.integer("vocab_size", 1, INT32_MAX)
        return cls(
            name=model.string("name"),
            architecture=model.string("architecture"),
            vocab_size=vocab_size,
            hidden_size=model.integer("hidden_size", 1, INT32_MAX),
            layers=model.integer("layers", 1, INT32_MAX),
            max_context=model.integer("max_context", 1, INT32_MAX),
            stop_tokens=model.integers("stop_tokens", 0, vocab_size - 1),
            recipe=model.string("recipe"),
            details=model.record("details").members,
            identity=model.string("identity") if "identity" in model.members else "",
        )


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
    """manifest.json. `expert_policy`: one of policies.POLICIES, empty where not known; `kernels`:
    best first; `files`: every other file of the artifact, by name; `predictor`: hex BLAKE2b-256 of
    the manifest in the folder of that name, empty where there is none."""

    model: ModelDescription
    target: str
    expert_policy: str
    kernels: tuple[KernelVariant, ...]
    files: Mapping[str, FileEntry]
    predictor: str = ""

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Reads manifest.json; EmberdError says what is not as it must be."""
        try:
            top = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise EmberdError(f"{MANIFEST} is not JSON: {error}") from None
        record = Record(top, "manifest")
        if top.get("format") != FORMAT:
            raise EmberdError(f"{MANIFEST}: format {top.get('format')!r:.80}, expected {FORMAT!r}")
        for key, expected in (("version", VERSION), ("abi", ABI)):
            if top.get(key) != expected:
                raise EmberdError(
                    f"artifact {key} {top.get(key)!r:.80}, this emberd reads {expected}: "
                    "rebuild it with a matching emberc"
                )
        files = _files(record.record("files"))
        return cls(
            model=ModelDescription.from_record(record.record("model")),
            target=record.string("target"),
            expert_policy=record.string("expert_policy") if "expert_policy" in top else "",
            kernels=_kernels(record, files),
            files=files,
            predictor=record.string("predictor") if "predictor" in top else "",
        )

    def to_bytes(self) -> bytes:
        """manifest.json; equal manifests give equal bytes."""
        top = {"format": FORMAT, "version": VERSION, "abi": ABI, **asdict(self)}
        if not self.predictor:
            del top["predictor"]
        return (json.dumps(top, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def check_name(name: str) -> None:
    """File names are plain: nothing in an artifact points outside of it."""
    if not name or name.startswith(".") or "/" in name or "\0" in name:
        raise EmberdError(f"{name!r:.80} is not a plain file name")


def _files(record: Record) -> dict[str, FileEntry]:
    files = {}
    for name in record.members:
        check_name(name)
        entry = record.record(name)
        files[name] = FileEntry(entry.integer("bytes", 0, INT64_MAX), entry.string("blake2b"))
    for name in (PROGRAM, *LARGE):
        if name not in files:
            raise EmberdError(f"the manifest lists no {name}")
    return files


def _kernels(record: Record, files: Mapping[str, FileEntry]) -> tuple[KernelVariant, ...]:
    variants = []
    for entry in record.records("kernels"):
        features = entry.strings("cpu_features")
        variant = KernelVariant(entry.string("isa"), entry.string("file"), features)
        if variant.file not in files or variant.file in LARGE:
            raise EmberdError(f"manifest: kernel file {variant.file!r:.80} is not listed")
        variants.append(variant)
    if not variants:
        raise EmberdError("manifest: kernels is empty")
    return tuple(variants)
