"""The compiler's phases take the network: they leave no operator without a kernel."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
from emberd.compile.isa.isa import host_isas
from emberd.compile.passes.import_onnx import import_onnx
from emberd.compile.passes.lower_kernels import KernelLibrary
from emberd.compile.pipeline import _phases
from emberd.compile.predict.network import Weights, embedding_rows, to_onnx
from emberd.compile.predict.predictor import AHEAD
from emberd.compile.quantize.recipes import RECIPES
from emberd.compile.residency.trace import TraceHeader
from needs import needs
from onnx import helper

HEADER = TraceHeader("ab" * 32, layers=2, experts=8, top_k=2, expert_bytes=4096)
EMBEDDING, STATE = 32, 64


def random_weights(draw: np.random.Generator) -> Weights:
    experts, ahead = HEADER.layers * HEADER.experts, AHEAD * EMBEDDING
    shapes = [(experts, EMBEDDING), (4 * STATE, EMBEDDING), (4 * STATE, STATE), (4 * STATE,)]
    shapes += [(ahead, STATE), (ahead,), (AHEAD, experts)]
    return Weights(*(draw.standard_normal(shape, np.float32) * np.float32(0.3) for shape in shapes))


def as_block(model: onnx.ModelProto) -> onnx.ModelProto:
    """For one window, with the weights as inputs, as the compiler has them."""
    for value in [*model.graph.input, *model.graph.output]:
        value.type.tensor_type.shape.dim[0].dim_value = 1
    for weight in model.graph.initializer:
        found = helper.make_tensor_value_info(weight.name, weight.data_type, weight.dims)
        model.graph.input.append(found)
    del model.graph.initializer[:]
    return model


def test_compiled_it_does_what_onnxruntime_does() -> None:
    needs("tvm")
    import tvm
    from tvm import relax

    draw = np.random.default_rng(0)
    weights = random_weights(draw)
    model = to_onnx(weights, HEADER)
    rows = embedding_rows(np.array([[[1, 7], [0, 4]]]), HEADER.experts)
    hidden, cell = draw.standard_normal((2, 1, STATE), np.float32)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    expected = session.run(None, {"rows": rows, "hidden": hidden, "cell": cell})

    isa = host_isas()[0]
    library = KernelLibrary()
    module = import_onnx(as_block(model), 1, "float32")
    with tvm.target.Target(isa.target):
        for phase in _phases(RECIPES["f32"], "predictor", isa, library):
            module = phase(module)
    assert any(name.startswith("linear_") for name in library.builders)
    machine = relax.VirtualMachine(tvm.compile(module, tvm.target.Target(isa.target)), tvm.cpu())
    given = [rows, hidden, cell, *weights.named().values()]
    results = machine["main"](*(tvm.runtime.tensor(np.ascontiguousarray(value)) for value in given))
    for result, right in zip(results, expected, strict=True):
        np.testing.assert_allclose(result.numpy(), right, rtol=1e-4, atol=1e-5)
