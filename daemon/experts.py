"""Which of a served model's experts are in memory: how many bytes of them, and which come first.

With a budget and an activation map, a policy may have the experts that commands choose most pinned,
or read as soon as the model is opened; and those of a prompt's class once its routing tells it: as
a rule in the first layers of its first step, so that those of the others are read before they are
reached, and again when it has been read. Such reads give way to those that a step waits for."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from emberd.daemon.activation_map import ActivationMap, Expert
from emberd.daemon.artifact import Artifact
from emberd.daemon.bindings import ExpertCounters
from emberd.daemon.command_class import ClassEvidence, likeliest_class
from emberd.daemon.core import PINNED, Model
from emberd.daemon.errors import EmberdError
from emberd.daemon.expert_ledger import ExpertLedger
from emberd.daemon.policies import DEFAULT, Policy
from emberd.daemon.shortcuts import Shortcuts, refusal

if TYPE_CHECKING:
    from emberd.daemon.expert_predictor import ExpertPredictor

_AHEAD_TOKENS = 64  # for which experts are read ahead
_LEAST_USES = 0.25  # of an expert by so many tokens, for it to be read ahead
_LEAST_USES_AT_WORK = 1.0  # when what is read may be in the way of what a step needs
_HOT = 2.0  # times as often chosen as experts are on an average
_LOOK_SECONDS = 0.001  # from one look at what layers have chosen to the next
log = logging.getLogger("emberd")


class Residency:
    """Opens the models of an artifact, one after the other, with the same budget for experts.

    Attributes: `budget` (bytes; None: all experts are mapped), `shortcuts` (of tokens that are
    decoded), `policy`.

    At any time there is one class for all of the model's work: that of the prompt that was read
    last. What experts cost from its beginning to that of the next prompt, or to a rest, is counted
    for its class, read-ahead included. Without a map, with prompts that are like no class, with
    requests for one token or none after a rest, and at rest, it is counted for none.

    A class is told by all that is chosen from the beginning of the last prompt on: also by the
    tokens that others decode between its chunks, a few against hundreds, and by prompts that are
    read in turns with it.
    """

    def __init__(
        self,
        budget: int | None,
        reader_threads: int,
        activation_map: ActivationMap | None = None,
        shortcuts: Shortcuts | None = None,
        policy: Policy = DEFAULT,
    ) -> None:
        """Without `shortcuts`, tokens take none; without a map, a `policy` does without what it
        needs one for."""
        self.budget = budget
        self.shortcuts = shortcuts or Shortcuts()
        self._reader_threads = reader_threads
        self._map = activation_map
        self.policy = policy
        classes = () if activation_map is None else activation_map.classes
        self._ledger = ExpertLedger([entry.name for entry in classes])
        self._counting = threading.Lock()
        self._working = False  # from a prompt's beginning to the next rest
        self._class: int | None = None
        self._chosen: Sequence[int] = ()  # how often each expert was, when a prompt last began
        self._told = threading.Event()  # once nobody looks any more what class the prompt is of
        self._preferring = threading.Lock()
        self._lock = threading.Lock()
        self._least = 0  # budget of a step, in bytes, once a model has been opened
        self._refusal = ""  # of shortcuts, by the model that was opened
        self._model: weakref.ref[Model] | None = None
        self._predictor: weakref.ref[ExpertPredictor] | None = None  # that follows the model
        self._compared: int | None = None  # budget that was compared with the token_demand

    def open(self, artifact: Artifact, threads: int | None) -> Model:
        """Opens the model. Raises EmberdError, also where the policy needs a predictor that the
        artifact has not."""
        with self._lock:
            model = Model(artifact, threads, self.budget, self._reader_threads)
            self._refusal = refusal(model)
            self.shortcuts.apply(model)
            model.expect_experts(self.policy.layer_ahead)
            self._least = model.least_expert_budget
            self._chosen = model.chosen_experts()
            with self._counting:
                self._model = weakref.ref(model)
                self._ledger.opened()
            self._compare(model)
            if self.policy.needs_predictor == "tokens":
                from emberd.daemon.expert_predictor import ExpertPredictor

                self._predictor = weakref.ref(
                    ExpertPredictor(artifact, model, self.policy.read_ahead)
                )
        self._prefer(model, None)
        return model

    @property
    def ledger(self) -> ExpertLedger:
        """What experts have cost since the first model was opened: until now at rest, otherwise
        until a prompt last began or was read."""
        with self._counting:
            if not self._working:
                self._count()
        return self._ledger

    def _count(self) -> None:
        """Adds what the open model has counted to the costs of the class; under its lock."""
        model = self._opened()
        if model is not None and self.budget is not None:
            self._ledger.count(model.expert_counters(), self._class, time.time())

    def prompt_begins(self) -> None:
        """Prefers the experts of the prompt's class while its first step runs, as soon as the
        layers that it has passed tell the class clearly."""
        model = self._opened()
        self._told.set()
        if model is None:
            return
        with self._counting:
            self._count()
            self._working = True
        self._chosen = model.chosen_experts()
        if self._map is None or self.budget is None or not self.policy.by_class:
            return
        self._told = threading.Event()
        arguments = (model, ClassEvidence(self._map), self._chosen, self._told)
        threading.Thread(target=self._tell, args=arguments, name="class", daemon=True).start()

    def _tell(
        self, model: Model, evidence: ClassEvidence, chosen: Sequence[int], told: threading.Event
    ) -> None:
        """Looks on in a thread of its own, for the step keeps the engine's. A layer has a say once
        its experts were chosen more often than when the prompt began: the step has come to it."""
        experts = model.experts.experts
        for layer in range(model.experts.layers):
            row = slice(layer * experts, (layer + 1) * experts)
            before = chosen[row]
            while (now := model.chosen_experts()[row]) == before:
                if told.wait(_LOOK_SECONDS):
                    return
            evidence.add(layer, [new - old for new, old in zip(now, before, strict=True)])
            found = evidence.clearest()
            if found is not None:
                with self._preferring, _unless_closed(model):
                    if not told.is_set():
                        self._prefer(model, found, layer + 1)
                return

    def prompt_read(self) -> None:
        """Tells the class that the tokens since the prompt began are likeliest of, and prefers its
        experts if the policy goes by class; none if they are like none."""
        self._told.set()
        model = self._opened()
        if model is None or self.budget is None:
            self._class = None
            return
        if self._map is not None:
            pairs = zip(model.chosen_experts(), self._chosen, strict=True)
            self._class = likeliest_class(self._map, [now - before for now, before in pairs])
            with self._preferring:
                if self.policy.by_class and self._class is None:
                    self._keep(model, [], [])
                elif self.policy.by_class:
                    self._prefer(model, self._class, least_uses=_LEAST_USES_AT_WORK)
        with self._counting:
            self._count()

    def at_rest(self) -> None:
        """Notes that no request is at work, or that the model was closed: nothing is of a class
        then until a prompt was read."""
        self._told.set()
        with self._counting:
            self._count()
            self._class = None
            self._working = False

    def change(self, budget: int | None, shortcuts: Shortcuts) -> None:
        """Changes both for the open model, after the step that it is at, and for later ones. Raises
        EmberdError where one of them is refused; both are then as before."""
        before = self.shortcuts
        self._take(shortcuts)
        try:
            self.set_budget(budget)
        except BaseException:
            self._take(before)
            raise

    def _take(self, shortcuts: Shortcuts) -> None:
        with self._lock:
            if shortcuts.wanted and self._refusal:  # or the next model could not be opened
                raise EmberdError(self._refusal)
            model = self._opened()
            if model is not None:
                with _unless_closed(model):
                    shortcuts.apply(model)
            self.shortcuts = shortcuts

    def set_budget(self, budget: int | None) -> None:
        """Changes the budget of the open model, after the step that it is at, and of later ones.

        Raises EmberdError for a budget that is too small; it is then as before.
        """
        with self._lock:
            model = self._opened()
            if model is not None:
                with _unless_closed(model):
                    model.set_expert_budget(budget)
            if budget is not None and budget < self._least:  # the next model could not be opened
                raise EmberdError(
                    f"an expert budget of {budget} bytes: a step needs {self._least} bytes at once"
                )
            with self._counting:
                self._count()
                self.budget = budget
            if model is not None:
                self._compare(model)
                with _unless_closed(model):
                    self._prefer(model, self._class)

    def _compare(self, model: Model) -> None:
        """Warns, once, of a budget that holds less than a token needs."""
        if self.budget not in (None, self._compared) and self.budget < model.token_demand:
            log.warning(
                "the expert budget of %d bytes is below the token_demand of %d bytes: most experts "
                "will be read from the disk for every token",
                self.budget,
                model.token_demand,
            )
        self._compared = self.budget

    def counters(self) -> list[ExpertCounters]:
        """What the experts of each layer have cost since the model was opened; empty before."""
        model = self._opened()
        return [] if model is None else model.expert_counters()

    def _prefer(
        self,
        model: Model,
        command_class: int | None,
        layer: int = 0,
        least_uses: float = _LEAST_USES,
    ) -> None:
        """Pins and reads ahead what the policy wants for a class, or for any command: where it
        does not go by class, and for None. `layer`: the one that a step will come to next; only
        hot experts are read then, of this layer first, and then of those after it.
        `least_uses`: by so many tokens as are read ahead for."""
        if self._map is None or self.budget is None or not self.policy.needs_map:
            return
        if not self.policy.by_class:
            command_class = None
        layout = model.experts
        slots = min(self.budget // layout.expert_bytes, layout.layers * layout.experts)
        hottest = self._map.hottest(slots, command_class)
        pinned = hottest[: int(self.policy.pinned * slots)]
        least = least_uses / (_AHEAD_TOKENS * layout.top_k)
        masses = [self._map.mass(layer, command_class) for layer in range(layout.layers)]
        wanted = hottest if self.policy.warmed else pinned
        soon = [(layer, expert) for layer, expert in wanted if masses[layer][expert] >= least]
        if layer:
            hot = _HOT / layout.experts
            soon = [(at, expert) for at, expert in soon if masses[at][expert] >= hot]
            soon.sort(key=lambda found: (found[0] < layer, found[0]))
        self._keep(model, pinned, soon)

    def _keep(self, model: Model, pinned: Sequence[Expert], soon: Sequence[Expert]) -> None:
        """Pins these and no others, and has those read that are likely to be used `soon`."""
        predictor = None if self._predictor is None else self._predictor()
        if predictor is not None:
            predictor.pin(pinned)
        elif self.policy.pinned:
            layout = model.experts
            priorities = [0] * (layout.layers * layout.experts)
            for layer, expert in pinned:
                priorities[layer * layout.experts + expert] = PINNED
            model.set_expert_priorities(priorities)
        model.warm_experts(soon)

    def _opened(self) -> Model | None:
        return None if self._model is None else self._model()


@contextmanager
def _unless_closed(model: Model) -> Iterator[None]:
    """Whatever fails of a model that was closed meanwhile does not matter."""
    try:
        yield
    except EmberdError:
        if not model.closed:
            raise
