"""What tests of several folders share."""

from __future__ import annotations

from pathlib import Path

import pytest
from needs import needs


@pytest.fixture(scope="session")
def demo_artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded demo model at q4, built for this machine: a folder to read only."""
    needs("tvm")
    from emberd.compile.build import build

    artifact = tmp_path_factory.mktemp("demo") / "artifact"
    model = Path(__file__).parents[1] / "firmware_assets" / "demo" / "model"
    build(model, artifact, "host", "q4", name="demo")
    return artifact
