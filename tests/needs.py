"""What tests need and a machine may lack."""

from __future__ import annotations

import importlib.util
import os

import pytest


def needs(package: str) -> None:
    """Skip without the package, or fail where everything is required."""
    if importlib.util.find_spec(package) is None:
        if os.environ.get("EMBERD_REQUIRE_ALL") == "1":
            pytest.fail(f"{package} is not installed and EMBERD_REQUIRE_ALL=1")
        pytest.skip(f"needs {package}, which is not installed")
