"""A planned Relax function, one for a block kind and chunk size, as a list of kernel calls."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import tvm
from emberd.compile.passes.quantise import BANK
from emberd.daemon.errors import EmberdError
from tvm import relax
from tvm.ir.expr import GenericConst

CACHES = ("key_cache", "value_cache")
_OUTPUTS = ("output", "bounds")  # results of a block that are not a state; bounds: of the head
_NOT_OF_TOKENS = (*CACHES, BANK)  # their first dimension is another that kernels leave open
ITEM_BYTES = {"float32": 4, "int32": 4, "int64": 8, "int16": 2, "int8": 1, "uint8": 1}


@dataclass(frozen=True)
class Tensor:
    """A tensor of a planned function: which storage it lies in, where, and its type.

    `storage`: a parameter's name, the number of a planned storage, or one of _OUTPUTS;
    `token_rows`: rows of each token, for the argument of a kernel that takes any number of tokens,
    else 0.
    """

    storage: str | int
    offset: int
    dtype: str
    shape: tuple[int, ...]
    token_rows: int = 0


Call = tuple[str, list[Tensor]]
"""The symbol of a kernel, and its arguments."""


@dataclass(frozen=True)
class BlockProgram:
    """A block kind for a number of tokens: a flat list of calls over planned storages.

    `storages`: bytes of each planned storage; `constants`: tensors
    that the calls read, by storage name.
    """

    calls: list[Call]
    storages: list[int]
    constants: dict[str, np.ndarray]


def extract(module: tvm.IRModule, tokens: int, symbols: Mapping[str, str]) -> BlockProgram:
    """Read the list of kernel calls off the `main` of a block planned for `tokens` tokens.

    `symbols` maps names of functions in the module to kernel symbols where they differ.

    Raises EmberdError for anything in it that is not a call over planned memory.
    """
    return _Extractor(module, tokens, symbols).result


class _Extractor:
    def __init__(self, module: tvm.IRModule, tokens: int, symbols: Mapping[str, str]) -> None:
        function = module["main"]
        self._module, self._tokens, self._symbols = module, tokens, symbols
        self._values: dict[relax.Var, object] = {}
        self._outputs = _returned(function)
        self.result = BlockProgram([], [], {})
        for parameter in function.params:
            shape = tuple(
                int(size) if isinstance(size, tvm.tirx.IntImm) else -1
                for size in parameter.ty.shape
            )
            dtype = str(parameter.ty.dtype)
            self._values[parameter] = Tensor(parameter.name, 0, dtype, shape)
        for block in function.body.blocks:
            for binding in block.bindings:
                self._values[binding.var] = self._bind(binding.var, binding.value)

    def _bind(self, variable: relax.Var, value: relax.Expr) -> object:
        if isinstance(value, relax.Tuple):
            return [self._value(item) for item in value.fields]
        if isinstance(value, relax.TupleGetItem):
            fields = self._value(value.tuple_value)
            assert isinstance(fields, list)
            return fields[value.index]
        if isinstance(value, relax.Call):
            return self._call(variable, value)
        return self._value(value)

    def _call(self, variable: relax.Var, call: relax.Call) -> object:
        if isinstance(call.op, relax.GlobalVar):
            arguments = self._arguments(call)
            name = str(call.op.name_hint)
            self.result.calls.append((self._symbols.get(name, name), arguments))
            return None
        name = str(getattr(call.op, "name", call.op))
        if name == "relax.memory.alloc_storage":
            self.result.storages.append(int(call.args[0].values[0]))
            return len(self.result.storages) - 1
        if name == "relax.memory.alloc_tensor":
            storage = self._value(call.args[0])
            assert isinstance(storage, int)
            offset = int(call.args[1].value)
            return Tensor(storage, offset, *_type(variable))
        if name == "relax.builtin.alloc_tensor":
            dtype, shape = _type(variable)
            if variable in self._outputs:
                return Tensor(_OUTPUTS[self._outputs[variable]], 0, dtype, shape)
            self.result.storages.append(math.prod(shape) * ITEM_BYTES[dtype])
            return Tensor(len(self.result.storages) - 1, 0, dtype, shape)
        if name == "relax.reshape":
            source = self._tensor(call.args[0])
            return Tensor(source.storage, source.offset, *_type(variable))
        raise EmberdError(f"the compiler left an operator without a kernel: {name}")

    def _arguments(self, call: relax.Call) -> list[Tensor]:
        kernel = self._module[call.op]
        arguments = []
        for parameter, argument in zip(kernel.params, call.args, strict=True):
            tensor = self._tensor(argument)
            first, *_ = parameter.shape
            if not isinstance(first, tvm.tirx.IntImm) and tensor.storage not in _NOT_OF_TOKENS:
                rows, rest = divmod(tensor.shape[0], self._tokens)
                assert rows > 0 and rest == 0, f"{call.op}: {tensor} for {self._tokens} tokens"
                tensor = replace(tensor, token_rows=rows)
            arguments.append(tensor)
        return arguments

    def _value(self, expression: relax.Expr) -> object:
        if isinstance(expression, relax.Var):
            return self._values[expression]
        if isinstance(expression, GenericConst):
            return self._constant(expression.value.numpy())
        raise EmberdError(f"the compiler left an expression without a place: {expression}")

    def _tensor(self, expression: relax.Expr) -> Tensor:
        value = self._value(expression)
        assert isinstance(value, Tensor)
        return value

    def _constant(self, array: np.ndarray) -> Tensor:
        name = f"constant.{array.dtype}.{'x'.join(map(str, array.shape))}.{array.tobytes().hex()}"
        self.result.constants[name] = array
        return Tensor(name, 0, str(array.dtype), tuple(array.shape) or (1,))


def _type(variable: relax.Var) -> tuple[str, tuple[int, ...]]:
    return str(variable.ty.dtype), tuple(int(size) for size in variable.ty.shape)


def _returned(function: relax.Function) -> dict[relax.Var, int]:
    """Variables whose memory the function hands out, seen through tuples and reshapes, and as which
    of its results."""
    bound = {
        binding.var: binding.value for block in function.body.blocks for binding in block.bindings
    }
    found: dict[relax.Var, int] = {}
    pending: list[tuple[relax.Expr, int]] = [(function.body.body, 0)]
    while pending:
        expression, number = pending.pop()
        if isinstance(expression, relax.Tuple):
            pending += [(field, index) for index, field in enumerate(expression.fields)]
        elif isinstance(expression, relax.Var):
            found[expression] = number
            value = bound.get(expression)
            if isinstance(value, relax.Var | relax.Tuple):
                pending.append((value, number))
            elif isinstance(value, relax.TupleGetItem):
                source = bound.get(value.tuple_value)
                if isinstance(source, relax.Tuple):
                    pending.append((source.fields[value.index], number))
            elif isinstance(value, relax.Call) and str(value.op).endswith("reshape"):
                pending.append((value.args[0], number))
    return found
