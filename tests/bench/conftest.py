"""Skips what needs llama.cpp where the bench extra is not installed."""

from __future__ import annotations

import importlib.util

import pytest


@pytest.fixture(scope="session")
def llama_cpp() -> None:
    """Required by tests that run llama.cpp or write its files.

    Skipped even where everything is required: it is no part of emberd, and takes ten minutes to
    compile.
    """
    for package in ("gguf", "llama_cpp"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}: pip install '.[bench]'")
