"""The tiny model, built once, and opened; and what the embedded one decodes."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from decoding import TOKENS, decode
from emberd.daemon.artifact import Artifact
from emberd.daemon.core import Model
from needs import needs
from numpy.typing import NDArray
from tiny_model import TinyModel, tiny_program


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """The tiny model, its kernels compiled by TVM."""
    needs("tvm")
    source = Path(__file__).parent / "native" / "kernels.py"
    spec = importlib.util.spec_from_file_location("tiny_kernels", source)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    library = tmp_path_factory.mktemp("kernels") / "kernels.so"
    module.build(str(library))
    return TinyModel(library.read_bytes(), tiny_program())


@pytest.fixture(scope="session")
def tiny_artifact(tiny: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """The tiny model's artifact, opened."""
    return Artifact.open(tiny.write(tmp_path_factory.mktemp("artifacts") / "tiny"))


@pytest.fixture
def model(tiny_artifact: Artifact) -> Iterator[Model]:
    """The tiny model on two threads."""
    with Model(tiny_artifact, threads=2) as model:
        yield model


@pytest.fixture(scope="session")
def demo(demo_artifact: Path) -> Artifact:
    """The embedded model's artifact, opened."""
    return Artifact.open(demo_artifact)


@pytest.fixture(scope="session")
def demo_logits(demo: Artifact) -> NDArray[np.float32]:
    """Of the embedded model, all experts mapped, that decodes TOKENS."""
    with Model(demo, 2) as model:
        return decode(model, TOKENS)
