"""A model being served, and how it is made of an artifact."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from emberd.daemon.activation_map import ActivationMap
from emberd.daemon.artifact import Artifact
from emberd.daemon.config import Config
from emberd.daemon.core import Model
from emberd.daemon.engine import Engine
from emberd.daemon.errors import EmberdError
from emberd.daemon.experts import Residency
from emberd.daemon.metrics import Metrics
from emberd.daemon.policies import Policy, followed
from emberd.daemon.prompt import load_template, load_tokenizer, read_json
from emberd.daemon.server.fields import Fields
from emberd.daemon.shortcuts import Shortcuts
from emberd.daemon.template import ChatTemplate
from emberd.daemon.text import Tokenizer

log = logging.getLogger("emberd")


@dataclass
class Service:
    """A model being served.

    Attributes:
        name: its id in the API.
        template: None where the checkpoint has none: no chat then.
        defaults: sampling defaults of the checkpoint's generation_config.json.
        draining: new requests are refused.
        activation_map: which experts classes of commands choose, if the artifact says so.
        residency: where the experts are; None for a stand-in of a model.
    """

    name: str
    engine: Engine
    tokenizer: Tokenizer
    template: ChatTemplate | None
    stop_tokens: frozenset[int]
    config: Config
    defaults: dict[str, Any] = field(default_factory=dict)
    draining: bool = False
    created: int = 0
    activation_map: ActivationMap | None = None
    residency: Residency | None = None


def load_service(path: Path, config: Config, metrics: Metrics | None = None) -> Service:
    """Load an artifact and open its model. Raises EmberdError."""
    metrics = metrics or Metrics()
    metrics.reached("loading")
    artifact = Artifact.open(path)
    metrics.reached("artifact_checked")
    generation = read_json(artifact, "generation_config.json")
    tokenizer = load_tokenizer(artifact)
    metrics.reached("tokenizer_read")
    template = load_template(artifact)
    metrics.reached("template_compiled")
    activation_map = ActivationMap.of(artifact)
    residency = Residency(
        expert_budget(config),
        config.reader_threads,
        activation_map,
        shortcuts(config),
        _policy(artifact, config, activation_map),
    )
    engine = Engine(
        lambda: _open_model(artifact, config.threads or None, residency),
        tokenizer,
        slots=config.slots,
        context=config.context or None,
        max_queue=config.max_queue,
        keep_alive=config.keep_alive,
        metrics=metrics,
        prompt_begins=residency.prompt_begins,
        prompt_read=residency.prompt_read,
        at_rest=residency.at_rest,
    )
    metrics.reached("model_opened")
    return Service(
        name=artifact.model.name,
        engine=engine,
        tokenizer=tokenizer,
        template=template,
        stop_tokens=frozenset(artifact.model.stop_tokens),
        config=config,
        defaults=sampling_defaults(generation),
        created=int((path / "manifest.json").stat().st_mtime),
        activation_map=activation_map,
        residency=residency,
    )


def expert_budget(config: Config) -> int | None:
    """Of a configuration; None means that all experts are mapped."""
    return None if config.expert_budget < 0 else config.expert_budget


def shortcuts(config: Config) -> Shortcuts:
    """Of a configuration."""
    return Shortcuts(config.routing_margin, config.stall_deadline / 1000, config.stall_weight)


def _policy(artifact: Artifact, config: Config, activation_map: ActivationMap | None) -> Policy:
    """That of the settings, else of the artifact; a warning says where one that was asked for, or
    has a budget to keep, lacks a map. Raises EmberdError, also where it lacks a predictor."""
    try:
        policy = followed(config.expert_policy or artifact.expert_policy)
    except EmberdError as error:
        raise EmberdError(f"{artifact.path}: {error}") from None
    if policy.needs_predictor == "tokens" and not artifact.has_predictor:
        raise EmberdError(
            f"{artifact.path}: the policy {policy.name} needs a predictor, which emberc build "
            "--predictor ships: build it again, or choose another expert_policy"
        )
    matters = config.expert_policy or config.expert_budget >= 0
    if matters and policy.needs_map and activation_map is None:
        log.warning(
            "%s: without an activation map, %s is as %s; emberc build --map ships one",
            artifact.path,
            policy.name,
            policy.without_map,
        )
    return policy


def _open_model(artifact: Artifact, threads: int | None, residency: Residency) -> Model:
    """Raises EmberdError, also where the folder holds another artifact by now."""
    artifact.check_in_place()
    return residency.open(artifact, threads)


def sampling_defaults(generation_config: dict[str, Any]) -> dict[str, Any]:
    """The sampling settings of generation_config.json; do_sample false means greedy.

    Raises EmberdError naming the setting that no request may have either.
    """
    fields = Fields(generation_config, "generation_config.json: ")
    defaults = {
        "temperature": fields.number("temperature", 0, 2, None),
        "top_k": fields.integer("top_k", -1, 2**31 - 1, None),  # all of a smaller vocabulary
        "top_p": fields.number("top_p", 0, 1, None),
        "min_p": fields.number("min_p", 0, 1, None),
    }
    if not fields.boolean("do_sample", True):
        defaults["temperature"] = 0.0
    return {name: value for name, value in defaults.items() if value is not None}
