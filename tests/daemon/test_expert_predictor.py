"""What a predictor expects decides which experts stay and are read ahead, and changes no answer."""

from __future__ import annotations

import gc
import json
import shutil
import threading
import weakref
from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest
from emberd.daemon.activation_map import ActivationMap
from emberd.daemon.artifact import Artifact
from emberd.daemon.core import PINNED, Model
from emberd.daemon.errors import EmberdError
from emberd.daemon.expert_predictor import WINDOW, ExpertPredictor
from emberd.daemon.experts import Residency
from emberd.daemon.logits import Logits
from emberd.daemon.policies import POLICIES
from emberd.daemon.session import Session
from emberd.daemon.trace import RoutingTrace
from needs import needs

needs("tvm")

from emberd.compile.isa.isa import host_isas  # noqa: E402
from emberd.compile.predict.compiled import build_predictor  # noqa: E402
from emberd.compile.predict.network import Weights, reference, to_onnx  # noqa: E402
from emberd.compile.residency.trace import TraceHeader  # noqa: E402
from predictor_networks import random_weights  # noqa: E402

MAP = Path(__file__).parents[2] / "firmware_assets" / "demo" / "expert_activation_map.bin"
LAYERS, EXPERTS, TOP_K, EXPERT_BYTES = 4, 16, 2, 24576
HEADER = TraceHeader("", LAYERS, EXPERTS, TOP_K, EXPERT_BYTES)
SLOTS = 20
PROMPT = list(range(40, 80))


@pytest.fixture(scope="module")
def weights() -> Weights:
    return random_weights(HEADER, 32, 32)


@pytest.fixture(scope="module")
def artifact(
    demo_artifact: Path, weights: Weights, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The embedded model with a network that has learnt nothing."""
    copy = tmp_path_factory.mktemp("predicted") / "demo"
    return with_predictor(demo_artifact, copy, weights, HEADER)


def with_predictor(source: Path, copy: Path, weights: Weights, header: TraceHeader) -> Path:
    shutil.copytree(source, copy)
    build_predictor(to_onnx(weights, header), header, copy / "predictor", host_isas()[:1])
    digest = blake2b((copy / "predictor" / "manifest.json").read_bytes(), digest_size=32)
    manifest = json.loads((copy / "manifest.json").read_text())
    (copy / "manifest.json").write_text(json.dumps(manifest | {"predictor": digest.hexdigest()}))
    return copy


class Followed:
    """A model that a predictor follows, and what is asked of the core for it."""

    def __init__(self, artifact: Path, read_ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        self.priorities: list[array[int]] = []
        self.ahead: list[array[int]] = []
        self.model = Model(Artifact.open(artifact), 1, SLOTS * EXPERT_BYTES)
        monkeypatch.setattr(
            self.model, "set_expert_priorities", lambda found: self.priorities.append(found[:])
        )
        monkeypatch.setattr(self.model, "warm_indices", self.ahead.append)
        self.predictor = ExpertPredictor(Artifact.open(artifact), self.model, read_ahead)


@pytest.fixture
def followed(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Followed]:
    found = Followed(artifact, True, monkeypatch)
    with found.model:
        yield found


@pytest.fixture(scope="module")
def chosen(demo_artifact: Path) -> np.ndarray:
    """What the tokens of PROMPT choose: [tokens, layers, top_k]."""
    with Model(Artifact.open(demo_artifact), 1) as model, RoutingTrace(model) as trace:
        model.open_session(64).step(PROMPT)
        return np.array(trace.take().ids)


def expected(weights: Weights, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Priorities [layers * experts] and the likeliest [layers, top_k] after tokens from the first
    on."""
    hidden = cell = np.zeros((1, weights.state_size), np.float32)
    for token in ids:
        scores, hidden, cell = reference(weights, token, hidden, cell)
    likeliest = np.argsort(-scores[0], axis=-1, kind="stable")[:, :TOP_K]
    return scores.sum(axis=0).ravel() * 2**20, likeliest + EXPERTS * np.arange(LAYERS)[:, None]


def close(found: Sequence[int], right: np.ndarray) -> bool:
    return np.allclose(np.array(found), right, rtol=1e-3, atol=16)


def test_expectations_become_priorities_and_reads(
    followed: Followed, weights: Weights, chosen: np.ndarray
) -> None:
    """Of a prompt's last WINDOW tokens, and then of each token that follows."""
    session, cut = followed.model.open_session(64), len(PROMPT) - 3
    session.step(PROMPT[:cut])
    for end in range(cut, len(PROMPT) + 1):
        if end > cut:
            followed.model.step_batch([session], [PROMPT[end - 1]])
        priorities, likeliest = expected(weights, chosen[cut - WINDOW : end])
        assert close(followed.priorities[-1], priorities)
        assert followed.ahead[-1].tolist() == sorted(likeliest.ravel())
    assert len(followed.priorities) == len(followed.ahead) == 4


def test_a_short_step_goes_on_from_the_one_before(
    followed: Followed, weights: Weights, chosen: np.ndarray
) -> None:
    session = followed.model.open_session(64)
    for start in range(0, len(PROMPT), WINDOW):
        session.step(PROMPT[start : start + WINDOW])
    assert close(followed.priorities[-1], expected(weights, chosen)[0])


def test_a_conversation_that_went_back_is_read_anew(
    followed: Followed, weights: Weights, chosen: np.ndarray
) -> None:
    session = followed.model.open_session(64)
    session.step(PROMPT[:6])
    snapshot = session.snapshot()
    session.step(PROMPT[6:8])
    session.restore(snapshot)
    session.step(PROMPT[6:9])
    assert close(followed.priorities[-1], expected(weights, chosen[6:9])[0])
    session.reset()
    session.step(PROMPT[:3])
    assert close(followed.priorities[-1], expected(weights, chosen[:3])[0])


def test_what_several_conversations_expect_is_added_up(
    followed: Followed, weights: Weights, chosen: np.ndarray
) -> None:
    sessions = [followed.model.open_session(64) for _ in range(2)]
    sessions[0].step(PROMPT[:4])
    sessions[1].step(PROMPT[:9])
    followed.model.step_batch(sessions, [PROMPT[4], PROMPT[9]])
    found = [expected(weights, chosen[:end]) for end in (5, 10)]
    assert close(followed.priorities[-1], found[0][0] + found[1][0])
    likeliest = np.concatenate([likeliest.ravel() for _, likeliest in found])
    assert followed.ahead[-1].tolist() == sorted(likeliest)


def test_pins_stay_above_what_is_expected(
    followed: Followed, weights: Weights, chosen: np.ndarray
) -> None:
    session = followed.model.open_session(64)
    followed.predictor.pin([(0, 3), (2, 5)])
    session.step(PROMPT[:5])
    right, _ = expected(weights, chosen[:5])
    right[[3, 2 * EXPERTS + 5]] = PINNED
    assert close(followed.priorities[-1], right)
    followed.predictor.pin([(2, 5), (3, 0)])
    right[[3, 3 * EXPERTS]] = 0, PINNED  # until the next step
    assert close(followed.priorities[-1], right)


def test_pins_that_come_while_tokens_are_read_count_from_then_on(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = followed.predictor._read
    pinning = threading.Thread(target=followed.predictor.pin, args=([(1, 0)],))

    def read_while_pinning(session: Session, chosen: list[int]) -> Logits:
        pinning.start()
        pinning.join(0.1)  # it is done by then, unless it has to wait
        return read(session, chosen)

    monkeypatch.setattr(followed.predictor, "_read", read_while_pinning)
    followed.model.open_session(64).step(PROMPT[:5])
    pinning.join()
    assert followed.priorities[-1][EXPERTS] == PINNED
    assert followed.priorities[-1].count(PINNED) == 1


def test_while_a_prompt_is_read_nothing_is_expected(followed: Followed) -> None:
    """Nor is any of the prompt before it; single tokens are no prompts."""
    followed.predictor.pin([(1, 0)])
    pinned = followed.priorities[-1]
    sessions = [followed.model.open_session(64) for _ in range(2)]
    for session in sessions:
        session.step(PROMPT)
    followed.model.step_batch(sessions, PROMPT[:2])
    sessions[0].step(PROMPT[:1])
    resets = [found == pinned for found in followed.priorities]
    assert resets == [True, False, True, False, False, False]


def test_retaining_alone_reads_nothing_ahead(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed = Followed(artifact, False, monkeypatch)
    with followed.model as model:
        model.open_session(64).step(PROMPT)
        assert followed.priorities and not followed.ahead
        model.set_expert_budget(None)
        followed.priorities.clear()
        for _ in range(2):  # while all experts are mapped
            model.open_session(64).step(PROMPT)
        assert not any(map(any, followed.priorities))


def test_it_ends_with_the_model(artifact: Path) -> None:
    residency = Residency(SLOTS * EXPERT_BYTES, 1, policy=POLICIES["read-ahead"])
    opened = Artifact.open(artifact)
    model = residency.open(opened, 1)
    predictor = weakref.ref(model._trace)  # type: ignore[type-var]
    assert isinstance(predictor(), ExpertPredictor)
    model.close()
    gc.collect()
    assert predictor() is None
    Residency(None, 1, policy=POLICIES["lru"]).open(opened, 1).close()


def test_one_of_another_model_is_refused(demo_artifact: Path, tmp_path: Path) -> None:
    header = TraceHeader("", LAYERS, EXPERTS * 2, TOP_K, EXPERT_BYTES)
    copy = with_predictor(demo_artifact, tmp_path / "demo", random_weights(header, 32, 32), header)
    residency = Residency(None, 1, policy=POLICIES["read-ahead"])
    with pytest.raises(EmberdError, match="its predictor is of another model"):
        residency.open(Artifact.open(copy), 1)


@pytest.mark.parametrize("name", ["predictor-retained", "pinned-retained", "read-ahead"])
@pytest.mark.parametrize("slots", [3, SLOTS, 40])
def test_answers_are_the_same_bits(artifact: Path, name: str, slots: int) -> None:
    """With a prompt, single tokens and two conversations at a time."""
    opened, found = Artifact.open(artifact), ActivationMap.read(MAP)
    with Model(opened, 2) as model:
        right = answer(model, model.open_session(256), model.open_session(256))
    residency = Residency(slots * EXPERT_BYTES, 2, found, policy=POLICIES[name])
    with residency.open(opened, 2) as model:
        first, second = model.open_session(256), model.open_session(256)
        for _ in range(2):
            residency.prompt_begins()
            assert answer(model, first, second) == right
            residency.prompt_read()


def answer(model: Model, first: Session, second: Session) -> list[bytes]:
    """The logits of some steps from the first on."""
    first.reset()
    second.reset()
    first.step(PROMPT)
    second.step(PROMPT[::-1])
    logits = []
    for token in PROMPT:
        logits.append(bytes(model.step_batch([first, second], [token, token + 1]).memory()))
        logits.append(bytes(model.step_batch([first], [token]).memory()))
    return logits
