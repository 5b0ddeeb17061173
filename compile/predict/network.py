"""The network of the lstm predictor: its weights, one step in numpy, and that step as ONNX.

A token's experts of all layers are embedded and added up (the product of a multi-hot vector with
the embedding); a long short-term memory (Hochreiter and Schmidhuber 1997, with forget gates as in
torch.nn.LSTM) takes them token by token, its state zero before the first of a command; for each of
the next AHEAD tokens a projection of its output is multiplied with every expert's embedding. The
scores are each layer's softmax. What it has learnt from windows of WINDOW tokens it does with more
as well.

The file is one ONNX graph of standard operators, with its weights inside, for one token: `rows`
int32 [layers * top_k], of the embedding; `hidden` and `cell` f32 [1, H] -> `scores` f32 [AHEAD,
layers, experts], `hidden_out`, `cell_out`. Its metadata name the model whose routing it has learnt.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from emberd.compile.blocks.graph import IR_VERSION, OPSET, Graph, Shape, floats
from emberd.compile.predict.predictor import AHEAD, Scores
from emberd.compile.residency.trace import TraceHeader
from emberd.daemon.errors import EmberdError
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

Floats = NDArray[np.float32]

FORMAT = "emberd-predictor"
VERSION = "2"


@dataclass(frozen=True)
class Weights:
    """float32, with D the size of an embedding and H that of the state; gates are in the order
    input, forget, cell, output.

    embedding [layers * experts, D]; input_weight [4H, D], state_weight [4H, H], gate_bias [4H];
    ahead_weight [AHEAD * D, H], ahead_bias [AHEAD * D]; score_bias [AHEAD, layers * experts].
    """

    embedding: Floats
    input_weight: Floats
    state_weight: Floats
    gate_bias: Floats
    ahead_weight: Floats
    ahead_bias: Floats
    score_bias: Floats

    @property
    def state_size(self) -> int:
        """H."""
        return int(self.state_weight.shape[1])

    def named(self) -> dict[str, Floats]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True)
class TrainedNetwork:
    """The graph of a file, and the identity of the model whose routing it has learnt."""

    path: Path
    graph: onnx.ModelProto
    model: str

    @property
    def shape(self) -> tuple[int, int, int]:
        """Layers, experts of each, top_k."""
        scores, rows = (
            [dimension.dim_value for dimension in value.type.tensor_type.shape.dim]
            for value in (self.graph.graph.output[0], self.graph.graph.input[0])
        )
        return scores[1], scores[2], rows[0] // scores[1]

    def check_model(self, model: str) -> None:
        """Raises EmberdError where `model` is not the identity of the one it was made for."""
        if self.model != model:
            raise EmberdError(
                f"{self.path}: has learnt the routing of another model: train it again"
            )


def read_network(path: Path) -> TrainedNetwork:
    """Raises EmberdError when the file is none that `emberc profile --train` wrote."""
    try:
        graph = onnx.load_model_from_string(path.read_bytes())
        onnx.checker.check_model(graph)
        about = {entry.key: entry.value for entry in graph.metadata_props}
        if (about["format"], about["version"]) == (FORMAT, VERSION):
            return TrainedNetwork(path, graph, about["model"])
    except OSError as error:
        raise EmberdError(f"{path}: cannot be read: {error.strerror}") from None
    except Exception:  # protobuf and the checker raise types of their own
        pass
    raise EmberdError(f"{path}: not a predictor; emberc profile --train writes them")


def embedding_rows(ids: NDArray[np.integer], experts: int) -> NDArray[np.int32]:
    """ids [layers, top_k] of a token -> int32 [layers * top_k]."""
    rows = ids.astype(np.int32) + experts * np.arange(len(ids), dtype=np.int32)[:, None]
    return rows.reshape(-1)


def reference(
    weights: Weights, ids: NDArray[np.integer], hidden: Floats, cell: Floats
) -> tuple[Scores, Floats, Floats]:
    """One step: ids [layers, top_k], hidden and cell [1, H] -> scores [AHEAD, layers, experts], and
    the new hidden and cell."""
    layers = len(ids)
    experts = len(weights.embedding) // layers
    x = weights.embedding[embedding_rows(ids, experts)].sum(axis=0, keepdims=True)
    gates = x @ weights.input_weight.T + hidden @ weights.state_weight.T + weights.gate_bias
    take, keep, new, give = np.split(gates, 4, axis=1)
    cell = _sigmoid(keep) * cell + _sigmoid(take) * np.tanh(new)
    hidden = _sigmoid(give) * np.tanh(cell)
    ahead = (hidden @ weights.ahead_weight.T + weights.ahead_bias).reshape(AHEAD, -1)
    logits = (ahead @ weights.embedding.T + weights.score_bias).astype(np.float32)
    logits = logits.reshape(AHEAD, layers, experts)
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True), hidden, cell


def check(model: onnx.ModelProto, weights: Weights, ids: NDArray[np.integer]) -> None:
    """Raises EmberdError where onnxruntime does otherwise than `reference` when both read tokens
    that chose ids [tokens, layers, top_k] one after the other."""
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    experts = len(weights.embedding) // ids.shape[1]
    hidden = cell = right_hidden = right_cell = np.zeros((1, weights.state_size), np.float32)
    for token in ids:
        feed = {"rows": embedding_rows(token, experts), "hidden": hidden, "cell": cell}
        scores, hidden, cell = session.run(["scores", "hidden_out", "cell_out"], feed)
        right, right_hidden, right_cell = reference(weights, token, right_hidden, right_cell)
        if not np.allclose(scores, right, rtol=1e-3, atol=1e-5):
            raise EmberdError("onnxruntime does not compute what the network is defined to")


def to_onnx(weights: Weights, header: TraceHeader) -> onnx.ModelProto:
    """The step as a checked graph, for traces with this header."""
    graph = Graph()
    embedded = graph.add("Gather", "embedding", "rows", axis=0)
    x = graph.add("ReduceSum", embedded, graph.constant([0]), keepdims=1)
    gates = graph.add(
        "Add", graph.linear(x, "input_weight"), graph.linear("hidden", "state_weight")
    )
    gates = graph.add("Add", gates, "gate_bias")
    sizes = [weights.state_size] * 4
    take, keep, new, give = graph.split(gates, sizes, ["take", "keep", "new", "give"])
    kept = graph.add("Mul", graph.add("Sigmoid", keep), "cell")
    taken = graph.add("Mul", graph.add("Sigmoid", take), graph.add("Tanh", new))
    cell = graph.add("Add", kept, taken, outputs=["cell_out"])
    given = graph.add("Sigmoid", give)
    hidden = graph.add("Mul", given, graph.add("Tanh", cell), outputs=["hidden_out"])
    ahead = graph.add("Add", graph.linear(hidden, "ahead_weight"), "ahead_bias")
    ahead = graph.reshape(ahead, AHEAD, weights.embedding.shape[1])
    scores = graph.add("Add", graph.linear(ahead, "embedding"), "score_bias")
    scores = graph.reshape(scores, AHEAD, header.layers, header.experts)
    graph.add("Softmax", scores, axis=-1, outputs=["scores"])
    state: Shape = [1, weights.state_size]
    chosen = [header.layers * header.top_k]
    rows = helper.make_tensor_value_info("rows", TensorProto.INT32, chosen)
    model = helper.make_model(
        helper.make_graph(
            graph.nodes,
            "predictor",
            [rows, floats("hidden", state), floats("cell", state)],
            [
                floats("scores", [AHEAD, header.layers, header.experts]),
                floats("hidden_out", state),
                floats("cell_out", state),
            ],
            [numpy_helper.from_array(value, name) for name, value in weights.named().items()],
        ),
        opset_imports=[helper.make_opsetid("", OPSET)],
        producer_name="emberd",
        ir_version=IR_VERSION,
    )
    helper.set_model_props(model, {"format": FORMAT, "version": VERSION, "model": header.model})
    onnx.checker.check_model(model, full_check=True)
    return model


def _sigmoid(x: Floats) -> Floats:
    return np.float32(1) / (np.float32(1) + np.exp(-x))
