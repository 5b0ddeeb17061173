"""The logits of a step: read, changed and drawn from in the core's memory."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from emberd.daemon.bindings import FAILED, REFUSED, Sampling, core
from emberd.daemon.errors import EmberdError, NoFiniteLogits

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
        """The values, as a writable memoryview of format "f" and shape [rows, vocab_size]."""
        self._check_current()
        row_bytes = self.vocab_size * 4
        used = memoryview(self._model._logits)[self._first * row_bytes :][: self.rows * row_bytes]
        return used.cast("f", (self.rows, self.vocab_size))

    def row(self, index: int) -> Logits:
        """One row on its own."""
        self._row(index)
        return Logits(self._model, 1, self._first + index % self.rows)

    def add(self, token: int, bias: float, row: int = -1) -> None:
        """Adds `bias` to the logit of `token`."""
        self._logit(token, row).value += bias

    def get(self, token: int, row: int = -1) -> float:
        """The logit of `token`."""
        return self._logit(token, row).value

    def top(self, k: int, row: int = -1) -> tuple[list[int], list[float]]:
        """The ids and logits of the `k` greatest, descending; equal ones by ascending id."""
        address = self._row(row)
        k = max(0, min(k, self.vocab_size))
        ids, values = (ctypes.c_int32 * k)(), (ctypes.c_float * k)()
        core.ember_top_k(address, self.vocab_size, k, ids, values)
        return ids[:], values[:]

    def log_sum_exp(self, row: int = -1) -> float:
        """log(sum(exp(logits))): with it, logit - log_sum_exp is a log-probability."""
        value: float = core.ember_log_sum_exp(self._row(row), self.vocab_size)
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
        """The token at `uniform` in [0, 1) of the distribution, in descending order.

        It is of the first `top_k` tokens (0: all), of these the fewest that have a share of `top_p`
        of their mass, and of these the ones at least `min_p` times as likely as the first. Raises
        EmberdError where no logit is finite.
        """
        if not temperature > 0:
            raise EmberdError(f"temperature {temperature}: expected one above 0")
        sampling = Sampling(temperature, top_k, top_p, min_p, uniform)
        token = ctypes.c_int32()
        address, size = self._row(row), self.vocab_size
        status = core.ember_draw(address, size, ctypes.byref(sampling), ctypes.byref(token))
        if status == REFUSED:
            raise NoFiniteLogits
        if status == FAILED:
            raise EmberdError("no memory to draw a token")
        return token.value

    def _check_current(self) -> None:
        if self._of_step != self._model._steps:
            raise EmberdError("these logits are gone: the model has made another step")

    def _logit(self, token: int, row: int) -> ctypes.c_float:
        address = self._row(row)
        if not 0 <= token < self.vocab_size:
            raise EmberdError(f"token id {token} is outside the vocabulary of {self.vocab_size}")
        return ctypes.c_float.from_address(address + 4 * token)

    def _row(self, row: int) -> int:
        self._check_current()
        if not -self.rows <= row < self.rows:
            raise EmberdError(f"row {row} of {self.rows}")
        index = self._first + row % self.rows
        return self._model._logits_address + index * self.vocab_size * 4
