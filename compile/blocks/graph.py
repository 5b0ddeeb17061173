"""A small writer of ONNX graphs, and the expressions that several blocks share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

OPSET = 21
IR_VERSION = 10  # the IR version of opset 21; newer ones are refused by older onnxruntime releases
DOMAIN = "emberd"
DOMAIN_VERSION = 1

Shape = Sequence[int | str]


class Graph:
    """Collects nodes in execution order; every method that adds one returns its output's name."""

    def __init__(self, prefix: str = "") -> None:
        """`prefix` keeps the names of a nested graph apart from those of the graph around it."""
        self.nodes: list[onnx.NodeProto] = []
        self._prefix = prefix
        self._constants: dict[tuple[str, tuple[int, ...], bytes], str] = {}

    def add(
        self,
        operator: str,
        *inputs: str,
        outputs: Sequence[str] | None = None,
        domain: str = "",
        **attributes: Any,
    ) -> str:
        """Add one node; its outputs get a generated name unless named, the first is returned."""
        outputs = outputs or [f"{self._prefix}{operator.lower()}_{len(self.nodes)}"]
        node = helper.make_node(operator, inputs, outputs, domain=domain, **attributes)
        self.nodes.append(node)
        return outputs[0]

    def constant(self, value: np.ndarray | Sequence[int] | float) -> str:
        """A constant: a float becomes a float32 scalar, a list of integers an int64 vector."""
        array = np.asarray(value, dtype=np.float32 if isinstance(value, float) else None)
        key = (str(array.dtype), array.shape, array.tobytes())
        if key not in self._constants:
            self._constants[key] = self.add("Constant", value=numpy_helper.from_array(array))
        return self._constants[key]

    def reshape(self, x: str, *shape: int, output: str | None = None) -> str:
        outputs = [output] if output else None
        return self.add("Reshape", x, self.constant(list(shape)), outputs=outputs)

    def split(self, x: str, sizes: Sequence[int], names: Sequence[str]) -> list[str]:
        """Cut the last axis into parts of `sizes`."""
        self.add("Split", x, self.constant(list(sizes)), outputs=names, axis=-1)
        return list(names)

    def linear(self, x: str, weight: str, output: str | None = None) -> str:
        """x f32[..., K] times the transpose of weight f32[N, K] (the layout of torch.nn.Linear)."""
        transposed = self.add("Transpose", weight, perm=[1, 0])
        return self.add("MatMul", x, transposed, outputs=[output] if output else None)

    def silu(self, x: str) -> str:
        return self.add("Mul", x, self.add("Sigmoid", x))

    def normalize(self, x: str, eps: float) -> str:
        """x / sqrt(mean(x^2) + eps) over the last axis."""
        square = self.add("Mul", x, x)
        mean = self.add("ReduceMean", square, self.constant([-1]), keepdims=1)
        root = self.add("Sqrt", self.add("Add", mean, self.constant(eps)))
        return self.add("Div", x, root)

    def rms_norm(self, x: str, weight: str, eps: float) -> str:
        """Root mean square norm whose stored weight is zero-centred: the factor is 1 + weight."""
        factor = self.add("Add", weight, self.constant(1.0))
        return self.add("Mul", self.normalize(x, eps), factor)

    def function(
        self, name: str, inputs: Sequence[str], outputs: Sequence[str], attributes: Sequence[str]
    ) -> onnx.FunctionProto:
        """The nodes so far as the body of a local function.

        The body is written for fixed dimensions; a call repeats them as `attributes`, for readers
        of the graph such as the compiler.
        """
        opset = [helper.make_opsetid("", OPSET)]
        return helper.make_function(
            DOMAIN, name, inputs, outputs, self.nodes, opset, attributes=attributes
        )

    def model(
        self,
        name: str,
        inputs: Sequence[onnx.ValueInfoProto],
        weights: Mapping[str, Shape],
        outputs: Sequence[onnx.ValueInfoProto],
        functions: Sequence[onnx.FunctionProto] = (),
    ) -> onnx.ModelProto:
        """The nodes so far as a checked model; weights are graph inputs behind the data inputs."""
        graph = helper.make_graph(
            self.nodes,
            name,
            [*inputs, *(floats(weight, shape) for weight, shape in weights.items())],
            list(outputs),
        )
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, DOMAIN_VERSION)]
        model = helper.make_model(
            graph,
            opset_imports=opsets,
            functions=list(functions),
            producer_name="emberd",
            ir_version=IR_VERSION,
        )
        onnx.checker.check_model(model)
        return model


def floats(name: str, shape: Shape) -> onnx.ValueInfoProto:
    """A float32 graph input or output; symbolic dimensions are strings."""
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, list(shape))


def integers(name: str, shape: Shape) -> onnx.ValueInfoProto:
    """An int32 graph input or output."""
    return helper.make_tensor_value_info(name, TensorProto.INT32, list(shape))
