"""From planned Relax functions, one a block kind and chunk size, to a whole model's program."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from emberd.compile.block_program import CACHES, ITEM_BYTES, BlockProgram, Tensor
from emberd.compile.converted import BlockInstance, ConvertedModel
from emberd.compile.next_layer import ask_next_layer
from emberd.compile.passes.lower_kernels import ACQUIRE_EXPERTS
from emberd.compile.passes.quantise import BANK, EXPERT_TABLE
from emberd.daemon.program import BOUND_BLOCK, Buffer, Program, Section, Sequence, Step, StepKind

ALIGNMENT = 64


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
        later = self._next(position)
        asked = None if later is None else ask_next_layer(block)
        starts, end = [], scratch_start
        for size in block.storages if asked is None else asked.storages:
            starts.append(end)
            end += _aligned(size)
        self._scratch_bytes = max(self._scratch_bytes, end)

        def numbers(tensors: list[Tensor], weights: int = position) -> tuple[int, ...]:
            """The buffers of a call's arguments, with the weights of the block at a position."""
            found = []
            for tensor in tensors:
                buffer = self._buffer(weights, tensor, starts, source, target)
                found.append(self._number(replace(buffer, token_rows=tensor.token_rows)))
            return tuple(found)

        steps = []
        for symbol, arguments in block.calls:
            if ACQUIRE_EXPERTS not in symbol:
                kind = StepKind.CALL_IN_WAVES if symbol in self._in_waves else StepKind.CALL
                steps.append(Step(kind, self._symbol(symbol), numbers(arguments)))
                continue
            steps.append(Step(StepKind.ACQUIRE_EXPERTS, self._layer(position), numbers(arguments)))
            if asked is not None and later is not None:
                steps += [
                    Step(StepKind.CALL_AHEAD, self._symbol(ahead), numbers(tensors, later))
                    for ahead, tensors in asked.calls
                ]
                expected = numbers([asked.ids])
                steps.append(Step(StepKind.EXPECT_EXPERTS, self._layer(later), expected))
        return steps

    def _layer(self, position: int) -> int:
        layer = self.model.stack[position].layer
        assert layer is not None
        return layer

    def _next(self, position: int) -> int | None:
        """Where the next layer chooses its experts, if that is a block of the same kind."""
        stack = self.model.stack
        later = next((at for at in sorted(self.bank_indices) if at > position), None)
        same = later is not None and stack[later].block == stack[position].block
        return later if same else None

    def _buffer(
        self,
        position: int,
        tensor: Tensor,
        starts: list[int],
        source: Buffer,
        target: Buffer | None,
    ) -> Buffer:
        instance = self.model.stack[position]
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
        if name in CACHES:
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
