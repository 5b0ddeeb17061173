"""Which layer is asked ahead, where blocks of a stack differ."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from emberd.compile.program import ProgramBuilder


@pytest.mark.parametrize(
    ("blocks", "following"),
    [
        ("embed mixer moe mixer moe head", {2: 4, 4: None}),
        ("moe wide_moe moe moe", {0: None, 1: None, 2: 3, 3: None}),
    ],
)
def test_only_a_next_layer_of_the_same_kind_is_asked_ahead(
    blocks: str, following: dict[int, int | None]
) -> None:
    """Of another kind it may have other experts, or a router of another shape."""
    model: Any = SimpleNamespace(stack=[SimpleNamespace(block=name) for name in blocks.split()])
    builder = ProgramBuilder(model, {}, {position: np.arange(4) for position in following})
    assert {position: builder._next(position) for position in following} == following
