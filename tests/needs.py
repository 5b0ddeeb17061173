"""What tests need and a machine may lack."""

from __future__ import annotations

import importlib.util
import os
from typing import NoReturn

import pytest


def needs(package: str) -> None:
    """Skip without the package, or fail where everything is required."""
    if importlib.util.find_spec(package) is None:
        lacking(f"{package} is not installed")


def lacking(reason: str) -> NoReturn:
    """Skip for a reason, or fail where everything is required."""
    if os.environ.get("EMBERD_REQUIRE_ALL") == "1":
        pytest.fail(f"{reason} and EMBERD_REQUIRE_ALL=1")
    pytest.skip(reason)
