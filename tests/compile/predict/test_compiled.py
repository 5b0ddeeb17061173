"""The compiler takes the network as it takes models, and the core runs it as onnxruntime does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from emberd.compile.isa.isa import host_isas
from emberd.compile.predict.network import embedding_rows, to_onnx
from emberd.compile.predict.predictor import AHEAD
from emberd.compile.residency.trace import TraceHeader
from emberd.daemon.artifact import Artifact
from emberd.daemon.core import Model
from emberd.daemon.errors import EmberdError
from emberd.daemon.session import LogitsRole
from needs import needs
from predictor_networks import random_weights
from routed_commands import noise

needs("tvm")

from emberd.compile.predict.compiled import CompiledNetwork, build_predictor  # noqa: E402

HEADER = TraceHeader("ab" * 32, layers=3, experts=8, top_k=2, expert_bytes=4096)
EMBEDDING, STATE = 32, 96


@pytest.fixture(scope="module")
def network() -> onnx.ModelProto:
    return to_onnx(random_weights(HEADER, EMBEDDING, STATE), HEADER)


@pytest.fixture(scope="module")
def artifact(network: onnx.ModelProto, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("predictor") / "artifact"
    build_predictor(network, HEADER, path, host_isas()[:1])
    return path


def test_over_a_trace_it_does_what_onnxruntime_does(
    network: onnx.ModelProto, artifact: Path
) -> None:
    """Its state goes from token to token, and is zero again after a reset."""
    session = onnxruntime.InferenceSession(network.SerializeToString())
    compiled = CompiledNetwork(artifact, HEADER)
    for seed in (0, 1):
        state = [np.zeros((1, STATE), np.float32)] * 2
        for ids in noise(HEADER, 40, 0, seed).ids:
            rows = embedding_rows(ids, HEADER.experts)
            feed = {"rows": rows, "hidden": state[0], "cell": state[1]}
            expected, *state = session.run(["scores", "hidden_out", "cell_out"], feed)
            np.testing.assert_allclose(compiled.step(ids), expected, rtol=1e-4, atol=1e-6)
        compiled.reset()
    compiled.close()


def test_it_is_made_of_the_kernels_of_models(artifact: Path) -> None:
    symbols = Artifact.open(artifact).program.symbols
    layers = ["n384_k32", "n384_k96", f"n{AHEAD * EMBEDDING}_k96", "n24_k32"]
    for layer in layers:
        assert any(name.startswith("linear_") and layer in name for name in symbols), layer
    assert "embedding_f32_v24_h32_tn" in symbols


def test_what_is_no_row_of_the_embedding_is_refused(artifact: Path) -> None:
    rows = [0, 1, 8, 9, 16]
    with Model(Artifact.open(artifact), 1) as model:
        session = model.open_session(6)
        with pytest.raises(EmberdError, match="token id 24 is outside"):
            session.step([*rows, 24], LogitsRole.NONE)
        with pytest.raises(EmberdError, match="no sequence of role 1"):
            session.step([*rows, 23], LogitsRole.LAST)
        session.step([*rows, 23], LogitsRole.NONE)
