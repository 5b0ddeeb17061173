"""One answer being generated: sampling, text, and when to stop."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from emberd.daemon.answer import Answer, Piece
from emberd.daemon.protocols import LogitsView
from emberd.daemon.sampling import Sampled, Sampler, SamplingParameters
from emberd.daemon.text import Tokenizer

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Request:
    """What to generate.

    Attributes:
        prompt: token ids, at least one.
        max_tokens: per choice, thinking included; 0 only reads the prompt.
        boundary: tokens up to the end of the last user turn, where a later turn may go on.
        stop_tokens: end the answer and are not part of it.
        stops: strings that end the answer and are not part of it.
        thinking: as for Answer.
        score_prompt: report the prompt's log probabilities too; nothing is then reused.
    """

    prompt: Sequence[int]
    max_tokens: int
    sampling: SamplingParameters
    stop_tokens: frozenset[int]
    boundary: int | None = None
    stops: tuple[str, ...] = ()
    choices: int = 1
    thinking: bool | None = None
    score_prompt: bool = False


@dataclass
class Usage:
    """Token counts of a request, over all its choices."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0


class Delta(NamedTuple):
    """More of a choice's text, with the log probabilities of the tokens it came from."""

    choice: int
    piece: Piece
    logprobs: tuple[Sampled, ...] = ()


@dataclass(frozen=True)
class Scored:
    """More of the prompt's tokens with their log probabilities; comes before every Delta."""

    logprobs: tuple[Sampled, ...]


@dataclass(frozen=True)
class Finish:
    """A choice is complete."""

    choice: int
    reason: FinishReason


Event = Delta | Scored | Finish


class Generation:
    """One choice. `token` is the last one sampled; `finish` is set when the choice is complete."""

    def __init__(self, request: Request, choice: int, tokenizer: Tokenizer) -> None:
        self.choice = choice
        self.token = -1
        self.finish: FinishReason | None = None
        self.last_was_reasoning = False
        self._request = request
        self._sampler = Sampler(request.sampling, choice)
        self._answer = Answer(tokenizer, request.stops, request.thinking)
        self._left = request.max_tokens
        self._released = 0  # characters of content
        self._logprobs: deque[tuple[int, Sampled]] = deque()  # where each token's content begins

    def accept(self, logits: LogitsView, row: int = -1) -> Delta | None:
        """Sample the next token from a row; the text that it makes certain, if any."""
        sampled = self._sampler.sample(logits, row)
        self.token = sampled.token
        self._left -= 1
        answer = self._answer
        self.last_was_reasoning = answer.thinking
        if self.token in self._request.stop_tokens:
            self.finish = "stop"
            piece = answer.finish()
        else:
            start = answer.content_length
            piece = answer.push(self.token)
            if sampled.logprob is not None and not self.last_was_reasoning and not answer.thinking:
                self._logprobs.append((start, sampled))
            if answer.stopped:
                self.finish = "stop"
            elif self._left == 0:
                self.finish = "length"
                tail = answer.finish()
                piece = Piece(piece.content + tail.content, piece.reasoning)
        self._released += len(piece.content)
        logprobs = self._certain_logprobs() if self._logprobs else ()
        return Delta(self.choice, piece, logprobs) if piece or logprobs else None

    def _certain_logprobs(self) -> tuple[Sampled, ...]:
        """Those of tokens whose text is out; at the end, of all but a stop string's."""
        everything = self.finish is not None and not self._answer.stopped
        certain = []
        while self._logprobs and (everything or self._logprobs[0][0] < self._released):
            certain.append(self._logprobs.popleft()[1])
        return tuple(certain)
