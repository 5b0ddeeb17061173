"""A model without arithmetic: it says what a script, or a hash of its history, tells it to."""

from __future__ import annotations

import json
import math
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from draws import draw
from emberd.daemon.errors import EmberdError
from emberd.daemon.session import LogitsRole
from tokenizers.pre_tokenizers import ByteLevel

ADDED = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
PATTERN = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s+"
MERGES = (("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("#", "x"), ("Ġ", "#"))
TEMPLATE = """
{%- for message in messages %}
    {%- if message.role == 'system' and not loop.first %}
        {{- raise_exception('System message must be at the beginning.') }}
    {%- endif %}
{%- endfor %}
{%- if not messages | selectattr('role', 'equalto', 'user') | list %}
    {{- raise_exception('No user query found in messages.') }}
{%- endif %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == 'assistant' and '</think>' in content %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking %}
        {{- '<think>\\n' }}
    {%- endif %}
{%- endif %}
"""


def tokenizer_json() -> str:
    """A byte-level BPE tokenizer of a few merges, in the layout of Qwen3.5's."""
    alphabet = sorted(ByteLevel.alphabet())
    tokens = [*alphabet, *("".join(pair) for pair in MERGES)]
    layout = {"add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    byte_level = {"type": "ByteLevel", **layout}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    split = {
        "type": "Split",
        "pattern": {"Regex": PATTERN},
        "behavior": "Isolated",
        "invert": False,
    }
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": [
                {"id": len(tokens) + i, "content": text, "special": "think" not in text, **flags}
                for i, text in enumerate(ADDED)
            ],
            "normalizer": {"type": "NFC"},
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
            "post_processor": byte_level,
            "decoder": byte_level,
            "model": {
                "type": "BPE",
                "vocab": {token: i for i, token in enumerate(tokens)},
                "merges": [list(pair) for pair in MERGES],
            },
        }
    )


class FakeLogits:
    def __init__(self, values: list[list[float]]) -> None:
        self._values = values
        self.rows, self.vocab_size = len(values), len(values[0])

    def bias(self, biases: Mapping[int, float], row: int = -1) -> None:
        for token, bias in biases.items():
            self._values[row][token] += bias

    def get(self, token: int, row: int = -1) -> float:
        return self._values[row][token]

    def top(self, k: int, row: int = -1) -> tuple[list[int], list[float]]:
        values = self._values[row]
        ids = sorted(range(self.vocab_size), key=lambda i: (-values[i], i))[:k]
        return ids, [values[i] for i in ids]

    def log_sum_exp(self, row: int = -1) -> float:
        return math.log(math.fsum(math.exp(value) for value in self._values[row]))

    def draw(
        self,
        uniform: float,
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
        row: int = -1,
    ) -> int:
        return draw(self._values[row], uniform, temperature, top_k, top_p, min_p)[0]


@dataclass
class FakeModel:
    """`script`: the tokens of every answer, counted from the end of the prompt.

    Attributes:
        delay: seconds per step.
        poison: a token that makes a step fail.
        gate: steps wait for it.
        steps: session and number of tokens of each step so far.
        prompt_end: where the prompt of a history ends; needed with a script.
    """

    vocab_size: int
    script: Sequence[int] | None = None
    delay: float = 0.0002  # as fast as no real model: the event loop keeps up
    poison: int | None = None
    max_context: int = 4096
    max_chunk: int = 32
    gate: threading.Event = field(default_factory=threading.Event)
    steps: list[tuple[FakeSession, int]] = field(default_factory=list)
    open_sessions: int = 0
    prompt_end: Callable[[Sequence[int]], int] | None = None

    def __post_init__(self) -> None:
        self.gate.set()

    def open_session(self, capacity: int) -> FakeSession:
        self.open_sessions += 1
        return FakeSession(self, capacity)

    def step_batch(self, sessions: Sequence[FakeSession], tokens: Sequence[int]) -> FakeLogits:
        assert len(set(map(id, sessions))) == len(sessions) <= self.max_chunk
        rows: list[list[float]] = []
        try:
            for session, token in zip(sessions, tokens, strict=True):
                view = session.step([token])
                assert view is not None
                rows += view._values
        except EmberdError:
            for session in sessions:
                session._failed = True
            raise
        return FakeLogits(rows)

    def close(self) -> None:
        self.gate.set()


class FakeSession:
    def __init__(self, model: FakeModel, capacity: int) -> None:
        self._model, self._capacity = model, capacity
        self.history: list[int] = []
        self._failed = False

    @property
    def length(self) -> int:
        return len(self.history)

    def step(self, tokens: Sequence[int], logits: Any = LogitsRole.LAST) -> FakeLogits | None:
        model = self._model
        model.gate.wait()
        model.steps.append((self, len(tokens)))
        if model.delay:
            time.sleep(model.delay)
        assert not self._failed and 1 <= len(tokens) <= model.max_chunk
        assert self.length + len(tokens) <= self._capacity
        if model.poison in tokens:
            self._failed = True
            raise EmberdError("expert 3 of layer 1 cannot be read")
        self.history += tokens
        if logits is LogitsRole.NONE:
            return None
        rows = len(tokens) if logits is LogitsRole.ALL else 1
        ends = range(self.length - rows + 1, self.length + 1)
        return FakeLogits([self._values(self.history[:end]) for end in ends])

    def _values(self, history: list[int]) -> list[float]:
        model = self._model
        if model.script is not None:
            assert model.prompt_end is not None
            done = len(history) - model.prompt_end(history)
            chosen = model.script[min(done, len(model.script) - 1)]
            return [20.0 if i == chosen else 0.0 for i in range(model.vocab_size)]
        seed = zlib.crc32(json.dumps(history).encode())
        return [
            ((seed ^ (i * 2654435761)) * 2246822519 % 2**32) / 2**30
            for i in range(model.vocab_size)
        ]

    def snapshot(self) -> list[int]:
        assert not self._failed
        return list(self.history)

    def restore(self, snapshot: list[int]) -> None:
        assert self.history[: len(snapshot)] == snapshot  # what the KV cache holds
        self.history = list(snapshot)

    def reset(self) -> None:
        self.history, self._failed = [], False

    def close(self) -> None:
        self._model.open_sessions -= 1
