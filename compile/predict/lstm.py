"""A small recurrent network, trained on traces, that reads what every token chose."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import onnxruntime
from emberd.compile.isa.isa import host_isas
from emberd.compile.predict.compiled import CompiledNetwork, build_predictor
from emberd.compile.predict.network import embedding_rows, read_network
from emberd.compile.predict.predictor import AHEAD, Scores
from emberd.compile.residency.trace import CommandTrace, TraceHeader


class Lstm:
    """Runs a file that `emberc profile --train` wrote in onnxruntime.

    Raises EmberdError when it is not such a file, or has learnt the routing of another model.
    """

    name = "lstm"
    horizons = tuple(range(1, AHEAD + 1))

    def __init__(self, path: Path, header: TraceHeader) -> None:
        network = read_network(path)
        network.check_model(header.model)
        self._model, self._header = network.graph, header
        self._state_size = self._model.graph.input[1].type.tensor_type.shape.dim[1].dim_value
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(
            self._model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )

    def compiled_microseconds(self, command: CommandTrace) -> float:
        """Of a token, when the network has been compiled and the core reads the command."""
        with tempfile.TemporaryDirectory() as folder:
            artifact = Path(folder) / "predictor"
            build_predictor(self._model, self._header, artifact, host_isas()[:1])
            with CompiledNetwork(artifact, self._header) as network:
                return network.microseconds(command.ids)

    def scores(self, command: CommandTrace) -> Scores:
        """See Predictor."""
        hidden = cell = np.zeros((1, self._state_size), np.float32)
        scores = []
        for ids in command.ids:
            feed = {"rows": embedding_rows(ids, self._header.experts)}
            feed |= {"hidden": hidden, "cell": cell}
            outputs = ["scores", "hidden_out", "cell_out"]
            found, hidden, cell = self._session.run(outputs, feed)
            scores.append(found)
        return np.stack(scores)
