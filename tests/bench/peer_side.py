"""llama.cpp under measurement, in process, through the C functions that llama-cpp-python wraps."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Sequence
from pathlib import Path

import llama_cpp.llama_cpp as llama
import numpy as np
from numpy.typing import NDArray

from bench.tokens import Tokens

BATCH = 2048  # most tokens of one call; llama.cpp computes them 512 at a time


class PeerSide:
    """See worker.Side. Everything as llama.cpp has it by default, threads and context aside."""

    def start(
        self,
        path: str,
        threads: int,
        context: int,
        streams: int,
        prompt: int,
        expert_budget: int | None = None,
    ) -> float:
        """Has no budget for experts: where there is one, all weights stay in the mapped file, as
        the copies that it else makes of them would not fit."""
        llama.llama_log_set(_silent, None)
        self._path = Path(path)
        start = time.perf_counter()
        llama.llama_backend_init()
        parameters = llama.llama_model_default_params()
        if expert_budget is not None:
            parameters.use_extra_bufts = False
        self._model = llama.llama_model_load_from_file(path.encode(), parameters)
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        vocabulary = llama.llama_model_get_vocab(self._model)
        self._vocab_size = llama.llama_vocab_n_tokens(vocabulary)
        self._tokens = Tokens(self._vocab_size)
        settings = llama.llama_context_default_params()
        settings.n_ctx = context * streams
        settings.n_seq_max = streams
        settings.n_batch = BATCH
        settings.n_threads = settings.n_threads_batch = threads
        self._context = llama.llama_init_from_model(self._model, settings)
        if not self._context:
            raise RuntimeError(f"llama.cpp cannot make {streams} contexts of {context} tokens")
        self._memory = llama.llama_get_memory(self._context)
        self._threads = threads
        self._lengths = [0] * streams
        self._batch = llama.llama_batch_init(BATCH, 0, 1)
        self._append(self._tokens.take(prompt))
        self._logits(-1).argmax()
        return time.perf_counter() - start

    def clear(self) -> float:
        llama.llama_memory_clear(self._memory, True)
        self._lengths = [0] * len(self._lengths)
        return 0.0

    def turn_to(self, topic: int, topics: int) -> float:
        self._tokens.turn_to(topic, topics)
        return 0.0

    def prefill(self, count: int) -> float:
        tokens = self._tokens.take(count)
        start = time.perf_counter()
        self._append(tokens)
        return time.perf_counter() - start

    def decode(self, count: int) -> float:
        streams = len(self._lengths)
        tokens = self._tokens.take(count * streams)
        start = time.perf_counter()
        for first in range(0, len(tokens), streams):
            step = tokens[first : first + streams]
            self._run([(stream, token, True) for stream, token in enumerate(step)])
        return time.perf_counter() - start

    def fill(self, count: int) -> float:
        """From the file that an earlier fill left beside the model's: 32k tokens take minutes."""
        start = time.perf_counter()
        file = self._path.with_name(f"{self._path.name}.{count}-tokens")
        if file.exists() and file.stat().st_mtime >= self._path.stat().st_mtime:
            self._restore(file, count)
        else:
            self._fill(count)
            self._save(file, count)
        return time.perf_counter() - start

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Append up to BATCH tokens to the first stream: their logits f32[T, V]."""
        self._run([(0, token, True) for token in tokens])
        return np.stack([self._logits(row) for row in range(len(tokens))])

    def close(self) -> None:
        llama.llama_batch_free(self._batch)
        llama.llama_free(self._context)
        llama.llama_model_free(self._model)

    def _fill(self, count: int) -> None:
        """On all cores, whatever the number of threads that is measured."""
        llama.llama_set_n_threads(self._context, self._threads, os.cpu_count() or 1)
        self.prefill(count - self._lengths[0])
        llama.llama_set_n_threads(self._context, self._threads, self._threads)

    def _save(self, file: Path, count: int) -> None:
        """The first stream's `count` tokens; the file tells nothing but zeros as their ids."""
        partial = file.with_name(f"{file.name}.partial")
        ids = (llama.llama_token * count)()
        if not llama.llama_state_seq_save_file(self._context, bytes(partial), 0, ids, count):
            raise RuntimeError(f"llama.cpp cannot write {partial}")
        partial.rename(file)

    def _restore(self, file: Path, count: int) -> None:
        """The first stream as `_save` wrote it to the file."""
        ids, found = (llama.llama_token * count)(), ctypes.c_size_t()
        if not llama.llama_state_seq_load_file(
            self._context, bytes(file), 0, ids, count, ctypes.byref(found)
        ):
            raise RuntimeError(f"llama.cpp cannot read {file}")
        self._lengths[0] = count

    def _append(self, tokens: Sequence[int]) -> None:
        """Tokens of the first stream, with the logits of the last one."""
        for first in range(0, len(tokens), BATCH):
            part = tokens[first : first + BATCH]
            last = len(tokens) - 1 - first
            self._run([(0, token, row == last) for row, token in enumerate(part)])

    def _run(self, rows: Sequence[tuple[int, int, bool]]) -> None:
        """Rows of (stream, token, whether its logits are wanted), computed to the end."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for row, (stream, token, wanted) in enumerate(rows):
            batch.token[row] = token
            batch.pos[row] = self._lengths[stream]
            batch.n_seq_id[row] = 1
            batch.seq_id[row][0] = stream
            batch.logits[row] = wanted
            self._lengths[stream] += 1
        if llama.llama_decode(self._context, batch) != 0:
            raise RuntimeError("llama.cpp could not compute a batch")
        llama.llama_synchronize(self._context)

    def _logits(self, row: int) -> NDArray[np.float32]:
        address = llama.llama_get_logits_ith(self._context, row)
        return np.ctypeslib.as_array(address, (self._vocab_size,)).copy()


@llama.llama_log_callback  # type: ignore[untyped-decorator]
def _silent(_level: int, _text: bytes, _data: ctypes.c_void_p) -> None:
    """llama.cpp tells a lot; what matters comes back as a status."""
