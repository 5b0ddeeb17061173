"""The network compiled as models are: its ONNX graph becomes an artifact that the core runs.

As a program it is a small recurrent model. The tokens of a step are the rows of the embedding that
a token of the traced model chose, layers * top_k of them; the vocabulary is all of the rows; hidden
and cell are the state of a session. The body of a step writes AHEAD rows of scores where the logits
of other models are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import onnx
from emberd.compile.block_program import ITEM_BYTES, BlockProgram, Tensor
from emberd.compile.isa.isa import Isa
from emberd.compile.layout import aligned
from emberd.compile.link import build_library
from emberd.compile.passes.import_onnx import import_onnx
from emberd.compile.passes.keep_state import keep_state
from emberd.compile.passes.lower_kernels import KernelLibrary
from emberd.compile.pipeline import compile_module
from emberd.compile.predict.network import embedding_rows
from emberd.compile.predict.predictor import AHEAD, Experts, Scores
from emberd.compile.quantize.recipes import RECIPES
from emberd.compile.residency.trace import TraceHeader
from emberd.daemon import program
from emberd.daemon.artifact import EXPERTS, WEIGHTS, Artifact
from emberd.daemon.artifact_writer import ArtifactWriter
from emberd.daemon.core import Model
from emberd.daemon.logits import Logits
from emberd.daemon.manifest import ModelDescription
from emberd.daemon.profile import Profile
from emberd.daemon.program import Buffer, Section, Step, StepKind
from emberd.daemon.session import LogitsRole
from emberd.targets.registry import HOST
from numpy.typing import NDArray
from onnx import helper, numpy_helper

_BLOCK = "predictor"
_RECIPE = RECIPES["f32"]
_STATES = ("hidden", "cell")
_TIMES = 8


def build_predictor(
    network: onnx.ModelProto,
    header: TraceHeader,
    destination: Path,
    isas: Sequence[Isa],
    target: str = HOST,
) -> None:
    """Writes the artifact of a network (see network.to_onnx) for traces with this header.

    `isas`: of the target called `target`, best first. Raises EmberdError when it cannot be written,
    or linking fails."""
    network, weights = _with_weights_as_inputs(network)
    module = import_onnx(network, 1, _RECIPE.cache_dtype)
    module = keep_state([value.name for value in network.graph.output])(module)
    library = KernelLibrary()
    block, _notes = compile_module(module, _BLOCK, 1, _RECIPE, isas[0], library)
    layout = _Layout(block, weights | block.constants)
    rows = header.layers * header.top_k
    description = ModelDescription(
        name=_BLOCK,
        architecture="lstm",
        vocab_size=header.layers * header.experts,
        hidden_size=weights["state_weight"].shape[1],
        layers=1,
        max_context=2**31 - 1,
        stop_tokens=(),
        recipe=_RECIPE.name,
        details={},
        identity=header.model,
    )
    with ArtifactWriter(destination, description, target=target) as writer:
        writer.write_program(layout.program(rows, header.layers * header.experts))
        for isa in isas:
            writer.add_kernels(isa.name, isa.cpu_features, build_library(library, isa))
        with writer.open_file(WEIGHTS) as file:
            for value in layout.weights.values():
                file.write(np.ascontiguousarray(value).data)
                file.write(bytes(aligned(file.size) - file.size))
        writer.write_file(EXPERTS, b"")


class CompiledNetwork:
    """The network of an artifact that `build_predictor` wrote, as the core runs it on one thread.

    Raises EmberdError as Artifact.open and Model do.
    """

    def __init__(self, artifact: Path, header: TraceHeader) -> None:
        self._header = header
        self._model = Model(Artifact.open(artifact), threads=1)
        self._session = self._model.open_session(self._model.max_context)

    def step(self, ids: Experts) -> Scores:
        """The scores [AHEAD, layers, experts] after a token that chose ids [layers, top_k]."""
        header = self._header
        rows = embedding_rows(ids, header.experts)
        self._session.step(rows.tolist(), LogitsRole.NONE)
        scores = np.array(Logits(self._model, AHEAD).memory())
        return scores.reshape(AHEAD, header.layers, header.experts)

    def microseconds(self, ids: Experts) -> float:
        """What its kernels take for one of the tokens that chose ids [tokens, layers, top_k]: the
        least of several times, as others use the machine too."""
        taken = []
        for _ in range(_TIMES):
            with Profile(self._model) as profile:
                for token in ids:
                    self.step(token)
            taken.append(sum(cost.seconds for cost in profile.costs()))
        return min(taken) / len(ids) * 1e6

    def reset(self) -> None:
        """Forgets what it has seen."""
        self._session.reset()

    def close(self) -> None:
        """Gives memory and threads back."""
        self._model.close()

    def __enter__(self) -> CompiledNetwork:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _Layout:
    """Where the tensors of the one block lie. `weights`: by name, in the order of weights.bin."""

    def __init__(self, block: BlockProgram, weights: dict[str, NDArray[np.float32]]) -> None:
        self.weights = weights
        self._block = block
        self._places: dict[str | int, tuple[Section, int]] = {
            "rows": (Section.TOKENS, 0),
            "output": (Section.LOGITS, 0),
        }
        sizes = [(name, value.nbytes) for name, value in weights.items()]
        self._place(Section.WEIGHTS, sizes)
        self._scratch_bytes = self._place(Section.SCRATCH, enumerate(block.storages))
        states = {
            tensor.storage: math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype]
            for _, arguments in block.calls
            for tensor in arguments
            if tensor.storage in _STATES
        }
        self._state_bytes = self._place(Section.STATE, states.items())

    def program(self, rows: int, vocabulary: int) -> program.Program:
        """For a step of so many rows."""
        symbols: dict[str, int] = {}
        buffers: dict[Buffer, int] = {}
        steps = []
        for symbol, arguments in self._block.calls:
            numbers = [buffers.setdefault(self._buffer(t), len(buffers)) for t in arguments]
            index = symbols.setdefault(symbol, len(symbols))
            steps.append(Step(StepKind.CALL, index, tuple(numbers)))
        return program.Program(
            symbols=tuple(symbols),
            chunk_sizes=(rows,),
            buffers=tuple(buffers),
            section_bytes={
                "scratch": self._scratch_bytes,
                "state": self._state_bytes,
                "kv_per_token": 0,
                "logits": AHEAD * vocabulary * 4,
                "bounds": 0,
                "tokens": rows * 4,
                "positions": rows * 4,
            },
            tables=b"",
            sequences=(program.Sequence(rows, "body", tuple(steps)),),
        )

    def _place(self, section: Section, sizes: Iterable[tuple[str | int, int]]) -> int:
        """Places tensors one after the other; returns the bytes of the section."""
        end = 0
        for name, size in sizes:
            self._places[name] = section, end
            end += aligned(size)
        return end

    def _buffer(self, tensor: Tensor) -> Buffer:
        section, offset = self._places[tensor.storage]
        return Buffer(section, tensor.dtype, tensor.shape, offset + tensor.offset)


def _with_weights_as_inputs(
    network: onnx.ModelProto,
) -> tuple[onnx.ModelProto, dict[str, NDArray[np.float32]]]:
    """The graph as blocks are; and its weights by name."""
    changed = onnx.ModelProto()
    changed.CopyFrom(network)
    graph = changed.graph
    weights = {entry.name: numpy_helper.to_array(entry) for entry in graph.initializer}
    for entry in graph.initializer:
        graph.input.append(helper.make_tensor_value_info(entry.name, entry.data_type, entry.dims))
    del graph.initializer[:]
    return changed, weights
