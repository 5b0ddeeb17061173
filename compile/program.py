"""From planned Relax functions, one a block kind and chunk size, to a whole model's program."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import tvm
from emberd.compile.converted import BlockInstance, ConvertedModel
from emberd.compile.passes.lower_kernels import ACQUIRE_EXPERTS
from emberd.compile.passes.quantise import BANK, EXPERT_TABLE
from emberd.daemon.errors import EmberdError
from emberd.daemon.program import BOUND_BLOCK, Buffer, Program, Section, Sequence, Step, StepKind
from tvm import relax
from tvm.ir.expr import GenericConst

ALIGNMENT = 64
_CACHES = ("key_cache", "value_cache")
_OUTPUTS = ("output", "bounds")  # results of a block that are not a state; bounds: of the head
_NOT_OF_TOKENS = (*_CACHES, BANK)  # their first dimension is another that kernels leave open
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


@dataclass(frozen=True)
class BlockProgram:
    """A block kind for a number of tokens: a flat list of calls over planned storages.

    `calls`: (symbol, arguments); `storages`: bytes of each planned storage; `constants`: tensors
    that the calls read, by storage name.
    """

    calls: list[tuple[str, list[Tensor]]]
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


@dataclass
class ProgramBuilder:
    """Unrolls block programs over a model's stack.

    `weight_offsets`: where `package` put each weight, by key (see `weight_key`), in weights.bin;
    `bank_indices`: which blob of experts.bin is each expert, i32[experts] by the position of its
    block in the stack.
    """

    model: ConvertedModel
    weight_offsets: dict[str, int]
    bank_indices: dict[int, np.ndarray]
    _buffers: dict[Buffer, int] = field(default_factory=dict)
    _symbols: dict[str, int] = field(default_factory=dict)
    _scratch_bytes: int = 0
    _state_bytes: int = 0
    _kv_bytes: int = 0
    _states: dict[str, Buffer] = field(default_factory=dict)
    _in_waves: frozenset[str] = frozenset()

    def build(
        self,
        blocks: dict[tuple[str, int], BlockProgram],
        chunks: list[int],
        of_one_token: Mapping[str, str],
        in_waves: Collection[str],
    ) -> Program:
        """`blocks`: every block kind of the model for every chunk size in `chunks`, 1 among them;
        `of_one_token`: for each kernel with a state, the one that takes a single token; `in_waves`:
        the kernels that take their experts a part after the other.
        """
        self._in_waves = frozenset(in_waves)
        sequences = []
        hidden_bytes = _aligned(chunks[-1] * self.model.dimensions.hidden_size * 4)
        for tokens in chunks:
            body = self._body(blocks, tokens, hidden_bytes)
            sequences += [
                Sequence(tokens, "logits_last", self._last(blocks, tokens, hidden_bytes)),
                Sequence(tokens, "logits_all", self._all(blocks, tokens, hidden_bytes)),
                Sequence(tokens, "body", body),
                Sequence(tokens, "batch", self._batch(body, of_one_token)),
            ]
        vocab, largest = self.model.dimensions.vocab_size, chunks[-1]
        bounds = -(-vocab // BOUND_BLOCK)
        return Program(
            symbols=tuple(self._symbols),
            chunk_sizes=tuple(chunks),
            buffers=tuple(self._buffers),
            section_bytes={
                "scratch": self._scratch_bytes,
                "state": self._state_bytes,
                "kv_per_token": self._kv_bytes,
                "logits": largest * vocab * 4,
                "bounds": largest * bounds * 4,
                "tokens": largest * 4,
                "positions": largest * 4,
            },
            tables=self._tables(),
            sequences=tuple(sequences),
        )

    def _tables(self) -> bytes:
        experts = self.model.dimensions.moe.experts
        stride = _aligned(experts * 4) // 4
        padded = np.zeros((len(self.bank_indices), stride), np.int32)
        padded[:, :experts] = np.stack(list(self.bank_indices.values()))
        return padded.tobytes()

    def _body(
        self, blocks: dict[tuple[str, int], BlockProgram], tokens: int, hidden_bytes: int
    ) -> tuple[Step, ...]:
        steps: list[Step] = []
        for position, instance in enumerate(self.model.stack[:-1]):
            source = self._hidden(position - 1, tokens, hidden_bytes)
            target = self._hidden(position, tokens, hidden_bytes)
            block = blocks[instance.block, tokens]
            steps += self._steps(position, block, source, target, 2 * hidden_bytes)
        return tuple(steps)

    def _all(
        self, blocks: dict[tuple[str, int], BlockProgram], tokens: int, hidden_bytes: int
    ) -> tuple[Step, ...]:
        head = len(self.model.stack) - 1
        source = self._hidden(head - 1, tokens, hidden_bytes)
        return tuple(self._steps(head, blocks["head", tokens], source, None, 2 * hidden_bytes))

    def _last(
        self, blocks: dict[tuple[str, int], BlockProgram], tokens: int, hidden_bytes: int
    ) -> tuple[Step, ...]:
        """The head of one token, after its row was taken to where kernels may read it."""
        head = len(self.model.stack) - 1
        hidden = replace(self._hidden(head - 1, tokens, hidden_bytes), token_rows=1)
        last = replace(self._hidden(0, 1, hidden_bytes), offset=2 * hidden_bytes)
        start = last.offset + _aligned(last.shape[1] * ITEM_BYTES[last.dtype])
        steps = self._steps(head, blocks["head", 1], last, None, start)
        arguments = (self._number(hidden), self._number(last))
        return (Step(StepKind.TAKE_LAST_ROW, 0, arguments), *steps)

    def _batch(self, body: tuple[Step, ...], of_one_token: Mapping[str, str]) -> tuple[Step, ...]:
        """The body with its kernels that have a state called for each token on its own."""
        singles = {
            self._symbol(symbol): self._symbol(single) for symbol, single in of_one_token.items()
        }
        return tuple(
            Step(StepKind.CALL_EACH, singles[step.symbol], step.arguments)
            if step.kind is StepKind.CALL and step.symbol in singles
            else step
            for step in body
        )

    def _hidden(self, position: int, tokens: int, hidden_bytes: int) -> Buffer:
        """Where the block at a position writes, and the next one reads: two places in turn."""
        shape = (tokens, self.model.dimensions.hidden_size)
        return Buffer(Section.SCRATCH, "float32", shape, position % 2 * hidden_bytes)

    def _number(self, buffer: Buffer) -> int:
        return self._buffers.setdefault(buffer, len(self._buffers))

    def _symbol(self, name: str) -> int:
        return self._symbols.setdefault(name, len(self._symbols))

    def _steps(
        self,
        position: int,
        block: BlockProgram,
        source: Buffer,
        target: Buffer | None,
        scratch_start: int,
    ) -> list[Step]:
        instance = self.model.stack[position]
        starts, end = [], scratch_start
        for size in block.storages:
            starts.append(end)
            end += _aligned(size)
        self._scratch_bytes = max(self._scratch_bytes, end)
        steps = []
        for symbol, arguments in block.calls:
            ids = [
                self._number(
                    replace(
                        self._buffer(position, instance, tensor, starts, source, target),
                        token_rows=tensor.token_rows,
                    )
                )
                for tensor in arguments
            ]
            if ACQUIRE_EXPERTS in symbol:
                layer = instance.layer
                assert layer is not None
                steps.append(Step(StepKind.ACQUIRE_EXPERTS, layer, tuple(ids)))
            else:
                kind = StepKind.CALL_IN_WAVES if symbol in self._in_waves else StepKind.CALL
                steps.append(Step(kind, self._symbol(symbol), tuple(ids)))
        return steps

    def _buffer(
        self,
        position: int,
        instance: BlockInstance,
        tensor: Tensor,
        starts: list[int],
        source: Buffer,
        target: Buffer | None,
    ) -> Buffer:
        dtype, shape, name = tensor.dtype, tensor.shape, tensor.storage
        if isinstance(name, int):
            return Buffer(Section.SCRATCH, dtype, shape, starts[name] + tensor.offset)
        if name == "output":
            if target is None:
                return Buffer(Section.LOGITS, dtype, shape, 0)
            return Buffer(Section.SCRATCH, dtype, shape, target.offset)
        if name == "bounds":
            return Buffer(Section.BOUNDS, dtype, shape, 0)
        if name == "hidden":
            return Buffer(Section.SCRATCH, dtype, shape, source.offset)
        if name == "tokens":
            return Buffer(Section.TOKENS, dtype, shape, 0)
        if name == "positions":
            return Buffer(Section.POSITIONS, dtype, shape, 0)
        if name in ("conv_state", "recurrent_state"):
            return self._state(f"{position}.{name}", dtype, shape)
        if name in _CACHES:
            return self._cache(f"{position}.{name}", dtype, shape)
        if name == EXPERT_TABLE:
            index = list(self.bank_indices).index(position)
            return Buffer(Section.TABLES, dtype, shape, index * _aligned(shape[0] * 4))
        if name == BANK:
            blobs = sum(map(len, self.bank_indices.values()))
            return Buffer(Section.EXPERTS, dtype, (blobs, shape[1]), 0)
        return Buffer(
            Section.WEIGHTS, dtype, shape, self.weight_offsets[weight_key(instance, name)]
        )

    def _state(self, key: str, dtype: str, shape: tuple[int, ...]) -> Buffer:
        if key not in self._states:
            self._states[key] = Buffer(Section.STATE, dtype, shape, self._state_bytes)
            self._state_bytes += _aligned(math.prod(shape) * ITEM_BYTES[dtype])
        return self._states[key]

    def _cache(self, key: str, dtype: str, shape: tuple[int, ...]) -> Buffer:
        if key not in self._states:
            self._states[key] = Buffer(Section.KV, dtype, (-1, *shape[1:]), self._kv_bytes)
            self._kv_bytes += math.prod(shape[1:]) * ITEM_BYTES[dtype]
        return self._states[key]


def weight_key(instance: BlockInstance, name: str) -> str:
    """What identifies a weight of the model; constants of a block kind are shared by all layers."""
    if name.startswith("constant."):
        return name
    return f"{instance.block}.{instance.layer}.{name}"


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
