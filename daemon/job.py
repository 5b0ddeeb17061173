"""A request at work in a slot: its prompt is read chunk by chunk, its answers token by token."""

from __future__ import annotations

import time
from collections.abc import Sequence

from emberd.daemon import prefix_cache
from emberd.daemon.generation import Finish, Generation, Scored
from emberd.daemon.metrics import Metrics
from emberd.daemon.prefix_cache import Slot
from emberd.daemon.protocols import LogitsView
from emberd.daemon.sampling import Sampled, score
from emberd.daemon.session import LogitsRole
from emberd.daemon.stream import Stream
from emberd.daemon.text import Tokenizer

SCORED_CHUNK = 32  # largest chunk with logits for each of its tokens: they take much memory
# A boundary ends a step, and a step reads all weights but some experts: as much time as so many
# tokens take that need no step of their own.
LEAST_SAVED = 32


class Job:
    """Takes a stream's request through a slot.

    Args:
        slot: goes on from its first ``reused`` tokens.
    """

    def __init__(
        self,
        stream: Stream,
        slot: Slot,
        reused: int,
        tokenizer: Tokenizer,
        metrics: Metrics,
    ) -> None:
        self.stream = stream
        self.slot = slot
        self._tokenizer = tokenizer
        self._metrics = metrics
        request = stream.request
        end = len(request.prompt) - 1
        boundaries = {
            end if request.boundary is None else request.boundary,
            prefix_cache.common_prefix(slot.tokens, request.prompt),
        }
        self._boundaries = {at for at in boundaries if at - reused >= LEAST_SAVED}
        if request.choices > 1:
            self._boundaries.add(end)
        slot.go_back(reused)
        if reused in self._boundaries and request.choices > 1:
            slot.save()
        stream.usage.cached_tokens = reused
        self._reading: Sequence[int] = request.prompt  # what to read before the next token
        self._read_from = reused
        self._scores = request.score_prompt
        self._generation = Generation(request, 0, tokenizer)
        self.token = -1
        """The last token generated, which the next step is of."""
        self._last_token = 0.0

    @property
    def unread(self) -> bool:
        """Whether no step has read any of what there is to read."""
        return len(self.slot.tokens) == self._read_from

    @property
    def prefilling(self) -> bool:
        """Whether the next step reads the prompt."""
        return len(self.slot.tokens) < len(self._reading)

    def prefill(self, limit: int) -> bool:
        """Read a chunk of at most ``limit`` tokens; True when the request is complete."""
        slot, request = self.slot, self.stream.request
        start = len(slot.tokens)
        end = start + self._chunk(start, limit)
        last = end == len(self._reading)
        role = LogitsRole.LAST if last and request.max_tokens else LogitsRole.NONE
        if self._scores:
            role = LogitsRole.ALL
        view = slot.step(self._reading[start:end], role)
        if self._scores:
            assert view is not None
            self._score(start, end, view)
        if end in self._boundaries:
            slot.save()
        if not last:
            return False
        self._scores = False
        if self.stream.usage.completion_tokens == 0:
            self._metrics.prompt_tokens += self.stream.usage.prompt_tokens
            self._metrics.cached_tokens += self.stream.usage.cached_tokens
        if request.max_tokens == 0:
            for choice in range(request.choices):
                self.stream.put(Finish(choice, "length"))
            return True
        assert view is not None
        return self._accept(view)

    def decode(self, view: LogitsView, row: int) -> bool:
        """Take its row of logits of that step; True when the request is complete."""
        self.slot.tokens.append(self.token)
        return self._accept(view, row)

    def read_again(self) -> None:
        """After a step that failed: read all up to the last token generated, and go on from it."""
        self._reading = [*self.slot.tokens, self.token]
        self.slot.reset()
        self._read_from = 0

    def _chunk(self, start: int, limit: int) -> int:
        """Tokens from ``start`` to the next boundary or the end, at most ``limit``."""
        if self._scores:
            limit = min(limit, SCORED_CHUNK)
        ends = [end for end in self._boundaries if end > start]
        return min([*ends, len(self._reading), start + limit]) - start

    def _score(self, start: int, end: int, view: LogitsView) -> None:
        """Report the tokens that follow the chunk's; the very first one follows none."""
        request = self.stream.request
        scored = [Sampled(request.prompt[0])] if start == 0 else []
        for row, token in enumerate(request.prompt[start + 1 : end + 1]):
            scored.append(score(token, view, request.sampling.logprobs or 0, row))
        self.stream.put(Scored(tuple(scored)))

    def _accept(self, view: LogitsView, row: int = -1) -> bool:
        generation = self._generation
        event = generation.accept(view, row)
        self.token = generation.token
        self._count()
        if event:
            self.stream.put(event)
        if generation.finish is None:
            return False
        self.stream.put(Finish(generation.choice, generation.finish))
        return self._next_choice()

    def _next_choice(self) -> bool:
        """Go back to the end of the prompt for the next choice; True if that was the last."""
        request, choice = self.stream.request, self._generation.choice + 1
        if choice == request.choices:
            return True
        self._reading = request.prompt
        self.slot.go_back(len(request.prompt) - 1)
        self._generation = Generation(request, choice, self._tokenizer)
        self._last_token = 0.0
        return False

    def _count(self) -> None:
        now = time.monotonic()
        metrics, usage = self._metrics, self.stream.usage
        if usage.completion_tokens == 0:
            metrics.time_to_first_token.observe(now - self.stream.submitted)
            metrics.reached("first_token")
        if self._last_token:
            metrics.time_per_token.observe(now - self._last_token)
        self._last_token = now
        metrics.generated_tokens += 1
        usage.completion_tokens += 1
        usage.reasoning_tokens += self._generation.last_was_reasoning
