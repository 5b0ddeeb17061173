"""What is read ahead follows the map, and the class that a prompt's routing looks like."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from emberd.daemon.activation_map import ActivationMap
from emberd.daemon.artifact import Artifact
from emberd.daemon.core import Model
from emberd.daemon.experts import Residency
from emberd.daemon.policies import POLICIES
from emberd.daemon.prompt import load_template, load_tokenizer
from emberd.daemon.session import Session

DEMO = Path(__file__).parents[2] / "firmware_assets" / "demo"
SLOTS = 16  # of the 64 experts of the embedded model


@pytest.fixture(scope="module")
def activation_map() -> ActivationMap:
    return ActivationMap.read(DEMO / "expert_activation_map.bin")


def resident(model: Model) -> set[tuple[int, int]]:
    experts = model.experts.experts
    return {divmod(i, experts) for i, there in enumerate(model.resident_experts()) if there}


def settled(model: Model, least: int = SLOTS) -> set[tuple[int, int]]:
    """What is resident when nothing more is read, `least` of them or more."""
    before: set[tuple[int, int]] = set()
    while (now := resident(model)) != before or len(now) < least:
        before = now
        time.sleep(0.05)
    return now


def prompts(artifact: Artifact, name: str) -> list[list[int]]:
    """Held-out commands of a class, as tokens."""
    tokenizer, template = load_tokenizer(artifact), load_template(artifact)
    assert template is not None
    lines = map(json.loads, (DEMO / "heldout.jsonl").read_text(encoding="utf-8").splitlines())
    chats = [line["messages"] for line in lines if line["class"] == name]
    found = [chat[: 1 + (chat[0]["role"] == "system")] for chat in chats]
    return [tokenizer.encode_with_control(template.render(m, True, {})) for m in found[:20]]


def test_the_map_is_warmed_and_then_the_class_of_the_prompt(
    demo_artifact: Path, activation_map: ActivationMap
) -> None:
    artifact = Artifact.open(demo_artifact)
    with Model(artifact) as model:
        budget = SLOTS * model.experts.expert_bytes
    residency = Residency(budget, 2, activation_map)
    with residency.open(artifact, 2) as model:
        assert settled(model) == set(activation_map.hottest(SLOTS))
        for index, entry in enumerate(activation_map.classes):
            residency.prompt_begins()
            with model.open_session(256) as session:
                session.prefill(prompts(artifact, entry.name)[0])
            residency.prompt_read()
            hottest = activation_map.hottest(SLOTS, index)
            others = activation_map.hottest(SLOTS, (index + 1) % len(activation_map.classes))
            now = settled(model)
            assert len(now & set(hottest)) > len(now & set(others))


@pytest.mark.parametrize(
    ("name", "ahead", "by_class"),
    [
        ("lru", 0, False),
        ("global-pinned", 20, False),
        ("map-pinned", 20, True),
        ("global-warmed", 40, False),
        ("map-warmed", 40, True),
        ("layer-ahead", 0, False),
        ("map-layer-ahead", 40, True),
    ],
)
def test_policies(
    demo_artifact: Path, activation_map: ActivationMap, name: str, ahead: int, by_class: bool
) -> None:
    """What is read before any token, what is there after a prompt and budgets that changed, and
    that answers are the same."""
    artifact, policy = Artifact.open(demo_artifact), POLICIES[name]
    tokens = prompts(artifact, "navigation")[0]
    with Model(artifact, 2) as model, model.open_session(256) as session:
        expected = answer(session, tokens)
        budget = 40 * model.experts.expert_bytes  # more than a layer has besides those pinned
    residency = Residency(budget, 2, activation_map, policy=policy)
    with residency.open(artifact, 2) as model, model.open_session(256) as session:
        assert settled(model, ahead) == set(activation_map.hottest(ahead))
        residency.prompt_begins()
        session.prefill(tokens)
        residency.prompt_read()
        index = activation_map.index("navigation") if by_class else None
        assert answer(session, tokens) == expected
        kept = set(activation_map.hottest(20 if policy.pinned else 0, index))
        assert settled(model, ahead) >= kept
        residency.set_budget(3 * model.experts.expert_bytes)  # of which a step needs two
        assert answer(session, tokens) == expected
        residency.set_budget(budget)
        assert settled(model, ahead) >= set(activation_map.hottest(ahead, index))
        read = sum(counters.expected for counters in model.expert_counters())
        assert policy.layer_ahead or not read


def answer(session: Session, tokens: list[int]) -> list[bytes]:
    """The logits after a prompt to an empty session, and after each of its tokens once more."""
    session.reset()
    first = session.prefill(tokens)
    assert first is not None
    found = [bytes(first.memory())]
    for token in tokens:
        logits = session.step([token])
        assert logits is not None
        found.append(bytes(logits.memory()))
    return found


def test_the_class_is_told_while_the_prompt_is_read(
    demo_artifact: Path, activation_map: ActivationMap
) -> None:
    artifact = Artifact.open(demo_artifact)
    with Model(artifact) as model:
        budget = SLOTS * model.experts.expert_bytes
    residency = Residency(budget, 2, activation_map)
    with residency.open(artifact, 2) as model, model.open_session(256) as session:
        settled(model)
        for name in ("climate", "navigation"):
            residency.prompt_begins()
            session.reset()
            session.prefill(prompts(artifact, name)[0])
            wait_until_told()
            hot, others = (hottest(activation_map, name, wanted) for wanted in (True, False))
            now = settled(model)
            assert len(now & hot) > len(now & others)
            residency.at_rest()


def test_what_others_decode_does_not_tell_a_prompts_class(
    demo_artifact: Path, activation_map: ActivationMap, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = Artifact.open(demo_artifact)
    climate, navigation = (prompts(artifact, name)[0] for name in ("climate", "navigation"))
    residency = Residency(SLOTS * 24576, 2, activation_map)
    with residency.open(artifact, 2) as model, model.open_session(256) as session:
        residency.prompt_begins()
        session.prefill(climate)
        residency.prompt_read()
        for token in climate:
            session.step([token])
        told: list[int | None] = []
        monkeypatch.setattr(
            residency, "_prefer", lambda _model, index, *_more, **_named: told.append(index)
        )
        residency.prompt_begins()
        time.sleep(0.05)  # for one to look on who should not be in a hurry
        assert told == []
        with model.open_session(256) as other:
            other.prefill(navigation)
        wait_until_told()
        residency.prompt_read()
        assert told == 2 * [activation_map.index("navigation")]


def test_what_was_asked_without_a_budget_does_not_tell_a_prompts_class(
    demo_artifact: Path, activation_map: ActivationMap
) -> None:
    artifact = Artifact.open(demo_artifact)
    residency = Residency(None, 2, activation_map)
    with residency.open(artifact, 2) as model, model.open_session(256) as session:
        for tokens in prompts(artifact, "climate"):
            session.reset()
            residency.prompt_begins()
            session.prefill(tokens)
            residency.prompt_read()
            residency.at_rest()
        residency.set_budget(SLOTS * 24576)
        session.reset()
        residency.prompt_begins()
        session.prefill(prompts(artifact, "navigation")[0])
        residency.prompt_read()
        costs = {c.name: c.total.hits + c.total.misses for c in residency.ledger.by_class()}
        assert costs.pop("navigation") > 0 and not any(costs.values())


def test_hot_experts_of_the_layers_ahead_come_first(
    demo_artifact: Path, activation_map: ActivationMap, monkeypatch: pytest.MonkeyPatch
) -> None:
    residency = Residency(40 * 24576, 2, activation_map)
    with residency.open(Artifact.open(demo_artifact), 1) as model:
        asked: list[Sequence[tuple[int, int]]] = []
        monkeypatch.setattr(model, "warm_experts", asked.append)
        for layer in (0, 2):
            residency._prefer(model, 1, layer)
        everything, early = asked
        assert list(everything) == activation_map.hottest(40, 1)
        hot = [(at, e) for at, e in everything if activation_map.mass(at, 1)[e] >= 2 / 16]
        assert sorted(early) == sorted(hot) and len(hot) < 40
        layers = list(dict.fromkeys(at for at, _ in early))
        assert layers == [2, 3, 0, 1]


def test_at_work_rarer_experts_are_not_read_ahead(
    demo_artifact: Path, activation_map: ActivationMap, monkeypatch: pytest.MonkeyPatch
) -> None:
    residency = Residency(63 * 24576, 2, activation_map)
    artifact = Artifact.open(demo_artifact)
    with residency.open(artifact, 1) as model, model.open_session(256) as session:
        asked: list[Sequence[tuple[int, int]]] = []
        residency.prompt_begins()
        residency.at_rest()  # nobody looks on
        session.prefill(prompts(artifact, "climate")[0])
        monkeypatch.setattr(model, "warm_experts", asked.append)
        residency.prompt_read()
        residency.set_budget(62 * 24576)
        index = activation_map.index("climate")
        for experts, uses in zip(asked, (1.0, 0.25), strict=True):
            least = uses / 64 / model.experts.top_k
            hottest = activation_map.hottest(64, index)
            enough = [(at, e) for at, e in hottest if activation_map.mass(at, index)[e] >= least]
            assert 0 < len(enough) < 60 and list(experts) == enough


def hottest(activation_map: ActivationMap, name: str, wanted: bool) -> set[tuple[int, int]]:
    """The experts of a class that are hot for no other class; or those of the others."""
    index = activation_map.index(name)
    found = [set(activation_map.hottest(SLOTS, i)) for i in range(len(activation_map.classes))]
    own = found.pop(index)
    return own - set.union(*found) if wanted else set.union(*found) - own


def wait_until_told() -> None:
    for thread in threading.enumerate():
        if thread.name == "class":
            thread.join(10)
            assert not thread.is_alive()


@pytest.mark.parametrize("end", [Residency.prompt_read, Residency.at_rest, Residency.prompt_begins])
def test_nobody_looks_on_when_a_prompt_is_over(
    demo_artifact: Path, activation_map: ActivationMap, end: Callable[[Residency], None]
) -> None:
    artifact = Artifact.open(demo_artifact)
    residency = Residency(8 * 24576, 2, activation_map)
    residency.prompt_begins()  # without a model
    with residency.open(artifact, 1):
        residency.prompt_begins()
        (thread,) = (thread for thread in threading.enumerate() if thread.name == "class")
        assert thread.is_alive()
        end(residency)
        thread.join(10)
        assert not thread.is_alive()
        residency.at_rest()
        wait_until_told()


def test_costs_count_for_the_class_of_the_prompt(
    demo_artifact: Path, activation_map: ActivationMap
) -> None:
    """From its first token on; a new model goes on counting."""
    artifact = Artifact.open(demo_artifact)
    climate, navigation = (prompts(artifact, name)[0] for name in ("climate", "navigation"))
    with Model(artifact) as model:
        residency = Residency(SLOTS * model.experts.expert_bytes, 2, activation_map)

    def asked() -> dict[str | None, int]:
        counted = residency.ledger.by_class()
        return {costs.name: costs.total.hits + costs.total.misses for costs in counted}

    def asked_of(model: Model) -> int:
        return sum(c.hits + c.misses for c in model.expert_counters())

    with residency.open(artifact, 2) as model, model.open_session(256) as session:
        residency.prompt_begins()
        session.prefill(climate)
        residency.prompt_read()
        prompt = asked_of(model)
        assert asked() == {"climate": prompt, "diagnosis": 0, "media": 0, "navigation": 0, None: 0}
        session.step([1])
        residency.at_rest()
        answer = asked_of(model)
        assert asked()["climate"] == answer > prompt
        session.step([1])
        residency.at_rest()
        assert asked()[None] == asked_of(model) - answer > 0
        others = asked_of(model)
    with residency.open(artifact, 2) as model, model.open_session(256) as session:
        residency.prompt_begins()
        session.prefill(climate)
        residency.prompt_read()
        for token in climate:  # of an answer that goes on
            session.step([token])
        before = asked_of(model)
        residency.prompt_begins()
        assert asked()["climate"] == answer + before
        with model.open_session(256) as other:
            other.prefill(navigation)
        residency.prompt_read()
        assert asked()["navigation"] == asked_of(model) - before > 0
        assert sum(asked().values()) == others + asked_of(model)


def test_nothing_that_experts_cost_is_lost(
    demo_artifact: Path, activation_map: ActivationMap
) -> None:
    """At rest, when the budget changes during a request, and when the model is closed."""
    artifact = Artifact.open(demo_artifact)
    residency = Residency(SLOTS * 24576, 2, activation_map)

    def counted() -> tuple[int, int]:
        totals = [costs.total for costs in residency.ledger.by_class()]
        return sum(t.hits + t.misses for t in totals), sum(t.bytes for t in totals)

    def cost(model: Model) -> tuple[int, int]:
        costs = model.expert_counters()
        return sum(c.hits + c.misses for c in costs), sum(c.bytes for c in costs)

    with residency.open(artifact, 2) as model, model.open_session(256) as session:
        settled(model)
        assert counted() == cost(model) == (0, SLOTS * 24576)
        residency.set_budget(2 * SLOTS * 24576)
        settled(model, 2 * SLOTS)
        assert counted() == cost(model) == (0, 2 * SLOTS * 24576)
        residency.prompt_begins()
        session.prefill(prompts(artifact, "climate")[0])
        residency.prompt_read()
        session.step([1])
        residency.set_budget(None)
        session.step([1])
        residency.at_rest()
        assert counted() == cost(model)
        residency.set_budget(SLOTS * 24576)
        residency.prompt_begins()
        session.step([1])
    residency.at_rest()
    assert counted() == cost(model)


def test_asking_at_rest_changes_no_class(
    demo_artifact: Path, activation_map: ActivationMap
) -> None:
    """What was read ahead before a prompt is of none, whether or not anybody asked."""
    artifact = Artifact.open(demo_artifact)
    for asks in (False, True):
        residency = Residency(SLOTS * 24576, 2, activation_map)
        with residency.open(artifact, 2) as model:
            settled(model)
            if asks:
                residency.ledger.by_class()
            residency.prompt_begins()
            costs = {c.name: c.total.bytes for c in residency.ledger.by_class()}
            assert costs.pop(None) == SLOTS * 24576 and not any(costs.values())


def test_a_budget_below_the_token_demand_warns_once(
    demo_artifact: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Case R1."""
    artifact = Artifact.open(demo_artifact)
    with Model(artifact, 1) as model:
        demand = model.token_demand
        assert demand == 4 * 2 * model.experts.expert_bytes
    with caplog.at_level(logging.WARNING, "emberd"):
        residency = Residency(demand, 2)
        residency.open(artifact, 1).close()
        assert caplog.text == ""
        residency.set_budget(demand - 1)
        for _ in range(3):  # as an idle daemon opens it again
            residency.open(artifact, 1).close()
        (first,) = caplog.messages
        assert f"budget of {demand - 1} bytes" in first
        assert f"token_demand of {demand} bytes" in first
        with residency.open(artifact, 1):
            residency.set_budget(demand - 2)
            residency.set_budget(demand - 2)
    assert len(caplog.messages) == 2


def test_without_a_budget_or_a_map_nothing_is_read_ahead(
    demo_artifact: Path, activation_map: ActivationMap
) -> None:
    artifact = Artifact.open(demo_artifact)
    for residency in (Residency(None, 2, activation_map), Residency(10**6, 2, None)):
        residency.prompt_read()
        with residency.open(artifact, 1) as model:
            residency.prompt_read()
            residency.at_rest()
            assert sum(c.bytes for c in model.expert_counters()) == 0
        residency.prompt_read()
