"""Logits as the core hands them out: operations in place, and how long they live."""

from __future__ import annotations

import math
from functools import partial

import pytest
from emberd.daemon.core import Model
from emberd.daemon.errors import EmberdError, NoFiniteLogits
from emberd.daemon.session import LogitsRole


def test_logits_die_with_the_next_step(model: Model) -> None:
    with model.open_session(8) as session:
        logits = session.step([1])
        assert logits is not None
        memory = logits.memory()
        session.step([2])
        for call in (logits.memory, logits.log_sum_exp, lambda: logits.top(1)):
            with pytest.raises(EmberdError, match="another step"):
                call()
        model.close()
        assert len(memory.tolist()) == 1  # the view keeps its memory


def test_logits_operations(model: Model) -> None:
    with model.open_session(8) as session:
        logits = session.step([1, 2, 3, 4], LogitsRole.ALL)
        assert logits is not None
        memory = logits.memory()
        logits.bias({token: token % 4 - memory[1, token] for token in range(16)}, row=1)
        ids, values = logits.top(5, row=1)
        assert (ids, values) == ([3, 7, 11, 15, 2], [3.0, 3.0, 3.0, 3.0, 2.0])
        logits.bias({2: 1.5}, row=1)
        assert logits.top(1, row=-3) == ([2], [3.5])
        assert logits.get(2, row=1) == 3.5
        total = sum(math.exp(memory[1, token]) for token in range(16))
        assert logits.log_sum_exp(1) == pytest.approx(math.log(total), rel=1e-6)
        assert [logits.draw(0.5, 1e-3, row=1), logits.draw(0.999, top_k=3, row=1)] == [2, 7]
        assert logits.top(100)[0] == logits.top(16, row=3)[0]
        with pytest.raises(EmberdError, match="row 4 of 4"):
            logits.top(1, row=4)
        wrong = ({1: 1.0, 16: 1.0}, {-1: 1.0}, {1 << 40: 1.0})
        for call in (*(partial(logits.bias, biases) for biases in wrong), lambda: logits.get(-1)):
            with pytest.raises(EmberdError, match="outside the vocabulary"):
                call()
        for temperature in (-1.0, math.nan):
            with pytest.raises(EmberdError, match="expected one of 0 or above"):
                logits.draw(0.5, temperature)
        with pytest.raises(EmberdError, match="a mask of 2 bytes: expected 8"):
            logits.mask(b"\xff\xff")


def test_nothing_is_drawn_from_logits_without_a_maximum(model: Model) -> None:
    with model.open_session(8) as session:
        logits = session.step([1])
        assert logits is not None
        for value in (math.inf, math.nan):
            logits.bias(dict.fromkeys(range(16), value))
            for temperature in (0.0, 1.0):
                with pytest.raises(NoFiniteLogits, match="may be damaged"):
                    logits.draw(0.5, temperature)


def test_a_mask_leaves_only_what_it_allows(model: Model) -> None:
    with model.open_session(8) as session:
        logits = session.step([1])
        assert logits is not None
        before = logits.memory().tolist()[0]
        logits.mask((1 << 3 | 1 << 11).to_bytes(8, "little"))
        kept = [value if token in (3, 11) else -math.inf for token, value in enumerate(before)]
        assert logits.memory().tolist() == [kept]
        logits.mask(bytes(8))
        with pytest.raises(NoFiniteLogits, match="may be damaged"):
            logits.draw(0.5)
