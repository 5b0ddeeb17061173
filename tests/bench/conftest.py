"""Skips what needs llama.cpp where the bench extra is not installed."""

from __future__ import annotations

import importlib.util
import os

import pytest


@pytest.fixture(scope="session")
def llama_cpp() -> None:
    """Required by tests that run llama.cpp or write its files."""
    for package in ("gguf", "llama_cpp"):
        if importlib.util.find_spec(package) is None:
            if os.environ.get("EMBERD_REQUIRE_ALL") == "1":
                pytest.fail(f"{package} is not installed and EMBERD_REQUIRE_ALL=1")
            pytest.skip(f"needs {package}: pip install '.[bench]'")
