"""The logits of a step: read, changed and drawn from in the core's memory."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Mapping
from typing import TYPE_CHECKING

from emberd.daemon.bindings import OK, ExpertLayout, Row, core
from emberd.daemon.errors import EmberdError, NoFiniteLogits
from emberd.daemon.program import BOUND_BLOCK

if TYPE_CHECKING:
    from emberd.daemon.core import Model


class Logits:
    """The logits of a step, float32[rows, vocab_size]: a view, valid until the model's next step.

    Every method raises EmberdError after that.
    """

    def __init__(self, model: Model, rows: int, first: int = 0) -> None:
        """Use Session.step or Model.step_batch."""
        self.rows = rows
        self._first = first
        self.vocab_size = model.vocab_size
        self._model = model
        self._of_step = model._steps

    def memory(self) -> memoryview[float]:
        """The values, as a read-only memoryview of format "f" and shape [rows, vocab_size]."""
        self._check_current()
        row_bytes = self.vocab_size * 4
        used = memoryview(self._model._logits)[self._first * row_bytes :][: self.rows * row_bytes]
        return used.cast("f", (self.rows, self.vocab_size)).toreadonly()

    def bias(self, biases: Mapping[int, float], row: int = -1) -> None:
        """Adds to the logit of each token what `biases` says."""
        tokens, values = self._tokens(biases), array("d", biases.values())
        where = (tokens.buffer_info()[0], values.buffer_info()[0], len(tokens))
        if core.ember_bias(self._row(row), *where) != OK:
            wrong = next(token for token in tokens if not 0 <= token < self.vocab_size)
            raise self._outside(wrong)

    def mask(self, allowed: bytes, row: int = -1) -> None:
        """Leaves only the tokens whose bit is set: that of token i is bit i % 8 of byte i // 8,
        and there is a whole number of 8 bytes; the others get -infinity."""
        expected = -(-self.vocab_size // BOUND_BLOCK) * BOUND_BLOCK // 8
        if len(allowed) != expected:
            raise EmberdError(f"a mask of {len(allowed)} bytes: expected {expected}")
        core.ember_mask(self._row(row), allowed)

    def get(self, token: int, row: int = -1) -> float:
        """The logit of `token`."""
        logits = self._row(row).logits
        if not 0 <= token < self.vocab_size:
            raise self._outside(token)
        return ctypes.c_float.from_address(logits + 4 * token).value

    def top(self, k: int, row: int = -1) -> tuple[list[int], list[float]]:
        """The ids and logits of the `k` greatest, descending; equal ones by ascending id."""
        k = max(0, min(k, self.vocab_size))
        ids, values = (ctypes.c_int32 * k)(), (ctypes.c_float * k)()
        core.ember_top_k(self._row(row), k, ids, values)
        return ids[:], values[:]

    def log_sum_exp(self, row: int = -1) -> float:
        """log(sum(exp(logits))): with it, logit - log_sum_exp is a log-probability."""
        value: float = core.ember_log_sum_exp(self._row(row))
        return value

    def draw(
        self,
        uniform: float,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        row: int = -1,
    ) -> int:
        """The token at `uniform` in [0, 1) of the distribution: in descending order, or in that
        of the ids where no filter leaves out any.

        It is of the first `top_k` tokens (0: all), of these the fewest that have a share of `top_p`
        of their mass, and of these the ones at least `min_p` times as likely as the first. With a
        temperature of 0 it is the first whatever the rest. Raises EmberdError where no logit is
        finite.
        """
        if not temperature >= 0:
            raise EmberdError(f"temperature {temperature}: expected one of 0 or above")
        token: int = core.ember_draw(self._row(row), uniform, temperature, top_k, top_p, min_p)
        if token == -1:
            raise NoFiniteLogits
        if token < 0:
            raise EmberdError("no memory to draw a token")
        return token

    def expect(self, layout: ExpertLayout, priorities: array[int]) -> array[int]:
        """Takes the rows for what a predictor expects of the next tokens, the nearest first: scores
        [rows, layers, experts], of which a layer's sum to 1. Adds the sum of an expert's to its
        priority, in units of 2**-20, unless it is pinned.

        Returns the experts that the nearest token is likeliest to choose, int32 layer * experts +
        expert [layers * top_k], the best of each layer first.
        """
        count = layout.layers * layout.experts
        if not len(priorities) == count == self.vocab_size:
            raise EmberdError(f"scores of {self.vocab_size} experts: the model has {count}")
        likeliest = array("i", bytes(4 * layout.layers * layout.top_k))
        core.ember_expect(
            self._row(0).logits,
            self.rows,
            layout,
            priorities.buffer_info()[0],
            likeliest.buffer_info()[0],
        )
        return likeliest

    def _check_current(self) -> None:
        if self._of_step != self._model._steps:
            raise EmberdError("these logits are gone: the model has made another step")

    def _tokens(self, biases: Mapping[int, float]) -> array[int]:
        try:
            return array("i", biases)
        except OverflowError:
            raise self._outside(max(biases, key=abs)) from None

    def _outside(self, token: int) -> EmberdError:
        return EmberdError(f"token id {token} is outside the vocabulary of {self.vocab_size}")

    def _row(self, row: int) -> Row:
        self._check_current()
        if not -self.rows <= row < self.rows:
            raise EmberdError(f"row {row} of {self.rows}")
        index, model, n = self._first + row % self.rows, self._model, self.vocab_size
        known = model._rows.get(index)
        if known is None:
            bounds = model._bounds_address
            if bounds is not None:
                bounds += index * -(-n // BOUND_BLOCK) * 4
            known = model._rows[index] = Row(model._logits_address + index * n * 4, bounds, n)
        return known
