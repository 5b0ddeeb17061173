"""The converted model run by onnxruntime: what everything downstream is compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx
import onnxruntime
from emberd.compile.converted import BlockInstance, ConvertedModel
from emberd.compile.dimensions import Dimensions
from emberd.daemon.errors import EmberdError

WeightProvider = Callable[[BlockInstance, str], np.ndarray]
"""Gives a weight f32 in its graph shape by instance and canonical name."""

GraphProvider = Callable[[str], onnx.ModelProto]
"""Gives the graph of a block kind."""

_KEPT_BYTES = 2 << 30  # models whose float32 weights fit in this stay loaded
_GATHER_BYTES = 128 << 20  # of expert matrices that one run of the MoE block may gather


class Oracle:
    """Runs the blocks of a converted model; sessions share its weights and graphs.

    `weights` replaces the checkpoint's weights, for example by dequantised ones, and `graphs` the
    blocks themselves. Weights are loaded once if all fit in 2 GB of float32, else block by block
    at every step.
    """

    def __init__(
        self,
        model: ConvertedModel,
        weights: WeightProvider | None = None,
        graphs: GraphProvider | None = None,
    ) -> None:
        self.model = model
        self._provider = weights or (lambda block, name: model.read_weight(block.weights[name]))
        graphs = graphs or model.block_model
        self._blocks = {
            block: onnxruntime.InferenceSession(
                graphs(block).SerializeToString(), providers=["CPUExecutionProvider"]
            )
            for block in {instance.block for instance in model.stack}
        }
        self._loaded: dict[int, dict[str, np.ndarray]] | None = None
        if 4 * sum(_elements(instance) for instance in model.stack) <= _KEPT_BYTES:
            self._loaded = {}

    def session(self) -> OracleSession:
        """A conversation with no tokens in it."""
        return OracleSession(self)

    def weights(self, position: int) -> dict[str, np.ndarray]:
        """The weights of block `position` of the stack by canonical name."""
        if self._loaded is not None and position in self._loaded:
            return self._loaded[position]
        instance = self.model.stack[position]
        weights = {name: self._provider(instance, name) for name in instance.weights}
        if self._loaded is not None:
            self._loaded[position] = weights
        return weights

    def run(self, block: str, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
        """Run a block kind; outputs in graph order."""
        return list(self._blocks[block].run(None, inputs))


class OracleSession:
    """One conversation: its length in tokens and the states of its layers."""

    def __init__(self, oracle: Oracle) -> None:
        self._oracle = oracle
        self.length = 0
        self._states: dict[int, list[np.ndarray]] = {}
        dimensions = oracle.model.dimensions
        for position, instance in enumerate(oracle.model.stack):
            if instance.block in _STATES:
                self._states[position] = _initial_states(instance.block, dimensions)
        self._moe_rows = _moe_rows(dimensions)

    def fork(self) -> OracleSession:
        """Another session that goes on from here."""
        fork = OracleSession(self._oracle)
        fork.length, fork._states = self.length, dict(self._states)
        return fork

    def step(
        self,
        tokens: Sequence[int] | np.ndarray,
        nudge: Callable[[np.ndarray], np.ndarray] | None = None,
    ) -> np.ndarray:
        """Append tokens and return the logits f32[T, V] after each of them. `nudge` changes their
        embeddings f32[T, hidden].

        Raises EmberdError when a token is outside the vocabulary, none is given, or the model's
        context is too short for them.
        """
        ids = np.asarray(tokens)
        dimensions = self._oracle.model.dimensions
        last = dimensions.vocab_size - 1
        if ids.ndim != 1 or not ids.size or ids.min() < 0 or ids.max() > last:
            raise EmberdError(f"expected tokens in 0..{last}, at least one")
        if self.length + ids.size > dimensions.max_context:
            raise EmberdError(
                f"{ids.size} more tokens do not fit: the session has {self.length} of "
                f"{dimensions.max_context}"
            )
        ids = ids.astype(np.int32)
        positions = np.arange(self.length, self.length + ids.size, dtype=np.int32)
        hidden = ids
        for position, instance in enumerate(self._oracle.model.stack):
            hidden = self._run(position, instance.block, hidden, positions)
            if instance.block == "embed" and nudge is not None:
                hidden = nudge(hidden)
        self.length += ids.size
        return hidden

    def _run(
        self, position: int, block: str, hidden: np.ndarray, positions: np.ndarray
    ) -> np.ndarray:
        run, inputs = self._oracle.run, self._oracle.weights(position)
        if block == "embed":
            return run(block, {**inputs, "tokens": hidden})[0]
        if block == "head":
            return run(block, {**inputs, "hidden": hidden})[0]
        if block == "moe":
            cuts = np.split(hidden, range(self._moe_rows, len(hidden), self._moe_rows))
            return np.concatenate([run(block, {**inputs, "hidden": rows})[0] for rows in cuts])
        inputs = {**inputs, "hidden": hidden}
        inputs.update(zip(_STATES[block], self._states[position], strict=True))
        if block == "gated_attention":
            inputs["positions"] = positions
        output, *self._states[position] = run(block, inputs)
        return output


_STATES = {
    "gated_delta": ("conv_state", "recurrent_state"),
    "gated_attention": ("key_cache", "value_cache"),
}


def _initial_states(block: str, dimensions: Dimensions) -> list[np.ndarray]:
    attention, delta = dimensions.attention, dimensions.gated_delta
    if block == "gated_attention" and attention is not None:
        shape = (0, attention.kv_heads, attention.head_dim)
        return [np.zeros(shape, np.float32), np.zeros(shape, np.float32)]
    assert delta is not None
    return [
        np.zeros((delta.conv_kernel - 1, delta.channels), np.float32),
        np.zeros((delta.value_heads, delta.key_dim, delta.value_dim), np.float32),
    ]


def _moe_rows(dimensions: Dimensions) -> int:
    """How many tokens may gather their experts at once."""
    moe = dimensions.moe
    per_token = 4 * moe.top_k * 3 * moe.intermediate_size * dimensions.hidden_size
    return max(1, _GATHER_BYTES // per_token)


def _elements(instance: BlockInstance) -> int:
    return sum(reference.elements for reference in instance.weights.values())
