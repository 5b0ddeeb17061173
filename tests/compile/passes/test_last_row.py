"""last_row: the block that hands the head the hidden state of a chunk's last token."""

from __future__ import annotations

import numpy as np
import pytest
from emberd.compile.passes.last_row import last_row
from relax_functions import random, run

HIDDEN = 40


@pytest.mark.parametrize("tokens", [1, 2, 8])
def test_gives_the_last_row_of_a_chunk(tokens: int) -> None:
    module = last_row(tokens, HIDDEN)
    (parameter,) = module["main"].params
    assert parameter.name == "hidden"
    hidden = random(tokens, HIDDEN)
    np.testing.assert_array_equal(run(module, hidden), hidden[-1:])
