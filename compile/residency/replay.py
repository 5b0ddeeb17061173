"""Replays a trace against a policy with a number of slots, and counts hits and reads."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import pairwise, zip_longest
from typing import Protocol

from emberd.compile.predict.predictor import Experts, Predictor, Scores, best
from emberd.compile.residency.trace import CommandTrace
from emberd.daemon.activation_map import ActivationMap, Expert
from emberd.daemon.policies import Policy

_NEVER = 1 << 62


@dataclass
class Outcome:
    """`accesses`: experts that steps asked for, once a step and layer; `hits`: of those, the ones
    in memory; `reads`: experts read, asked for or not."""

    tokens: int = 0
    accesses: int = 0
    hits: int = 0
    reads: int = 0

    @property
    def hit_rate(self) -> float:
        return self.hits / self.accesses

    @property
    def reads_per_token(self) -> float:
        return self.reads / self.tokens


@dataclass(frozen=True)
class Expectation:
    """What a predictor says after a token: `scores` f32 [layers, experts], of all the tokens that
    it predicts, and `likeliest` uint16 [layers, top_k] of the next one, best first."""

    scores: Scores
    likeliest: Experts

    @classmethod
    def of(cls, scores: Scores, top_k: int) -> Expectation:
        """From scores [horizons, layers, experts]."""
        return cls(scores.sum(axis=0), best(scores[0], top_k))


@dataclass(frozen=True)
class Step:
    """Tokens that are run together: the experts that they need, layer by layer, and what is
    expected after the last of them; or, at each layer, of the next one."""

    tokens: int
    layers: Sequence[Sequence[Expert]]
    expectation: Expectation | None = None
    next_layer: Sequence[Sequence[Expert]] = ()


def steps(
    command: CommandTrace, chunk: int, first: int | None = None, predictor: Predictor | None = None
) -> Iterator[Step]:
    """The steps of a command: its prompt in chunks of at most `chunk` tokens, then its answer one
    by one; `first`: of only so many tokens. What the `predictor` of next layers says of prompts is
    left out."""
    scores = None if predictor is None else predictor.scores(command)
    ids = command.ids[:first]
    prompt = min(command.prompt, len(ids))
    starts = [*range(0, prompt, chunk), *range(prompt, len(ids) + 1)]
    for start, end in pairwise(starts):
        together = ids[start:end]
        layers = [
            [(layer, expert) for expert in sorted(set(together[:, layer].ravel().tolist()))]
            for layer in range(ids.shape[1])
        ]
        if predictor is None or scores is None:
            yield Step(end - start, layers)
        elif 0 not in predictor.horizons:
            expectation = Expectation.of(scores[end - 1], ids.shape[2])
            yield Step(end - start, layers, expectation)
        else:
            likeliest = best(scores[end - 1, 0], ids.shape[2])[
                1 if start >= prompt else len(layers) :
            ]
            expected = [
                [(layer, expert) for expert in row]
                for layer, row in enumerate(likeliest.tolist(), start=1)
            ]
            yield Step(end - start, layers, next_layer=expected)


def replay(
    commands: Sequence[tuple[str, Sequence[Step]]],
    policy: Policy,
    slots: int,
    activation_map: ActivationMap | None = None,
    cold: bool = False,
) -> Outcome:
    """The outcome of commands (class, steps) one after another; `cold`: each begins with an empty
    cache.

    A step whose layer needs more experts than there are slots takes them in turn, those in memory
    first, and reads each of the others once. `activation_map` is there if the policy needs it;
    without expectations, a policy that needs a predictor is as one without.
    """
    outcome = Outcome()
    if policy.offline:
        for group in [[command] for command in commands] if cold else [commands]:
            every = [step for _, taken in group for step in taken]
            _run(_Offline(slots, outcome, every), every, outcome)
        return outcome
    cache = _Online(policy, slots, outcome, activation_map)
    for name, taken in commands:
        cache.begin(name, cold)
        _run(cache, taken, outcome)
    return outcome


class _Cache(Protocol):
    def begin_step(self, step: Step) -> None:
        """Called before a step is taken."""

    def acquire(self, needed: Sequence[Expert]) -> None:
        """Has all of `needed` in memory, or each in turn where there are too few slots."""

    def expect(self, step: Step) -> None:
        """Prepares for what is expected after a step that was taken."""

    def expect_layer(self, likeliest: Sequence[Expert]) -> None:
        """Prepares for what is expected of the next layer, the likeliest first."""


def _run(cache: _Cache, taken: Sequence[Step], outcome: Outcome) -> None:
    for step in taken:
        outcome.tokens += step.tokens
        cache.begin_step(step)
        for needed, likeliest in zip_longest(step.layers, step.next_layer, fillvalue=()):
            cache.acquire(needed)
            cache.expect_layer(likeliest)
        cache.expect(step)


class _Online:
    """Least recently used, and what a policy adds to it.

    As in the daemon, an expert that is expected less makes place before one that is expected more,
    whichever was used last; and nothing that is expected more makes place for a read ahead.
    """

    def __init__(
        self, policy: Policy, slots: int, outcome: Outcome, activation_map: ActivationMap | None
    ) -> None:
        self._policy = policy
        self._slots = slots
        self._outcome = outcome
        self._map = activation_map
        self._pinned: set[Expert] = set()
        self._others: OrderedDict[Expert, None] = OrderedDict()  # least recently used first
        self._expected: list[list[float]] = []  # of each layer's experts; empty: nothing is
        self._order: list[tuple[float, int, Expert]] = []  # heap by expectation, some outdated
        self._needed: set[Expert] = set()  # at the same time, or read ahead
        self._hottest: dict[int | None, list[Expert]] = {}

    def begin(self, command_class: str, cold: bool) -> None:
        """A command of this class follows; `cold`: after the memory was given back."""
        if cold:
            self._pinned.clear()
            self._others.clear()
        policy = self._policy
        if policy.pinned:
            self._pin(self._wanted(command_class)[: int(policy.pinned * self._slots)])
        self._rank()
        if policy.warmed and not self._others:
            for expert in reversed(self._wanted(command_class)):
                self._load(expert)

    def begin_step(self, step: Step) -> None:
        """What was expected of a few tokens says nothing of a whole prompt."""
        if step.tokens > 1:
            self._expected, self._order = [], []

    def acquire(self, needed: Sequence[Expert]) -> None:
        others, pinned, outcome = self._others, self._pinned, self._outcome
        misses = []
        for expert in needed:
            if expert in others:
                others.move_to_end(expert)
            elif expert not in pinned:
                misses.append(expert)
        outcome.accesses += len(needed)
        outcome.hits += len(needed) - len(misses)
        self._needed = set(needed)
        for expert in misses:
            self._load(expert)

    def expect(self, step: Step) -> None:
        if step.expectation is None:
            return
        self._needed = set()
        if self._policy.retained:
            self._expected = step.expectation.scores.tolist()
            self._rank()
        if self._policy.read_ahead:
            for layer, likeliest in enumerate(step.expectation.likeliest.tolist()):
                self._read_ahead([(layer, expert) for expert in likeliest])

    def expect_layer(self, likeliest: Sequence[Expert]) -> None:
        if self._policy.layer_ahead:
            self._read_ahead(likeliest)

    def _read_ahead(self, experts: Sequence[Expert]) -> None:
        for expert in experts:
            if expert not in self._others and expert not in self._pinned:
                self._load(expert, ahead=True)
                self._needed.add(expert)

    def _pin(self, experts: Sequence[Expert]) -> None:
        """Pins these and no others; what was pinned before is the first to be evicted."""
        new = set(experts)
        for expert in sorted(self._pinned - new):
            self._others[expert] = None
            self._others.move_to_end(expert, last=False)
        self._outcome.reads += len(new - self._pinned - self._others.keys())
        for expert in new:
            self._others.pop(expert, None)
        self._pinned = new
        while len(self._others) > self._slots - len(new):
            self._others.popitem(last=False)

    def _load(self, expert: Expert, ahead: bool = False) -> None:
        """Reads an expert in place of the first to be evicted; `ahead`: unless that is expected
        more."""
        if len(self._others) + len(self._pinned) >= self._slots:
            victim = self._victim()
            if ahead and self._expectation(victim) > self._expectation(expert):
                return
            del self._others[victim]
        self._others[expert] = None
        self._outcome.reads += 1
        if self._expected:
            heappush(self._order, (self._expectation(expert), len(self._others), expert))

    def _victim(self) -> Expert:
        """The first to be evicted: what is needed only where that is all there is."""
        kept = []
        found = None
        while self._order and found is None:
            entry = heappop(self._order)
            if entry[2] in self._others:
                kept.append(entry)
                found = None if entry[2] in self._needed else entry[2]
        for entry in kept:
            heappush(self._order, entry)
        return next(iter(self._others)) if found is None else found

    def _rank(self) -> None:
        """Puts all that may be evicted in the order of what is expected of them."""
        if self._expected:
            self._order = [
                (self._expectation(expert), index, expert)
                for index, expert in enumerate(self._others)
            ]
            heapify(self._order)

    def _expectation(self, expert: Expert) -> float:
        layer, number = expert
        return self._expected[layer][number] if self._expected else 0.0

    def _wanted(self, command_class: str) -> list[Expert]:
        """The map's most chosen experts for a class that it has, else for any command."""
        assert self._map is not None
        names = [entry.name for entry in self._map.classes]
        known = self._policy.by_class and command_class in names
        index = names.index(command_class) if known else None
        if index not in self._hottest:
            self._hottest[index] = self._map.hottest(self._slots, index)
        return self._hottest[index]


class _Offline:
    """Evicts the expert whose next use is furthest away, knowing all steps that will be taken.

    Even one that was just read: a step takes its experts in turn, so that none has to stay.
    """

    def __init__(self, slots: int, outcome: Outcome, taken: Sequence[Step]) -> None:
        self._slots = slots
        self._outcome = outcome
        self._later: dict[Expert, list[int]] = {}  # when each is acquired, the next time last
        acquired = [needed for step in taken for needed in step.layers]
        for number in range(len(acquired) - 1, -1, -1):
            for expert in acquired[number]:
                self._later.setdefault(expert, [_NEVER]).append(number)
        self._resident: dict[Expert, int] = {}  # and when each is used next
        self._furthest: list[tuple[int, Expert]] = []  # heap of (-next use, expert), some outdated

    def begin_step(self, step: Step) -> None:
        """It knows already."""

    def acquire(self, needed: Sequence[Expert]) -> None:
        resident, outcome = self._resident, self._outcome
        hits = sum(expert in resident for expert in needed)
        outcome.accesses += len(needed)
        outcome.hits += hits
        outcome.reads += len(needed) - hits
        for expert in needed:
            self._later[expert].pop()
            resident[expert] = self._later[expert][-1]
            heappush(self._furthest, (-resident[expert], expert))
        while len(resident) > self._slots:
            use, expert = heappop(self._furthest)
            if resident.get(expert) == -use:
                del resident[expert]

    def expect(self, step: Step) -> None:
        """It knows already."""

    def expect_layer(self, likeliest: Sequence[Expert]) -> None:
        """It knows already."""
