"""lower_kernels: every operator becomes a call of its kernel, which computes the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from emberd.compile.isa.isa import host_isas
from emberd.compile.kernels import causal_convolution
from emberd.compile.kernels.router import padded
from emberd.compile.passes import operators
from emberd.compile.passes.lower_kernels import KernelLibrary, lower_kernels
from emberd.compile.passes.operators import Scalar, tensor
from emberd.compile.passes.quantise import quantise
from emberd.compile.quantize.formats import FORMATS, pack_expert
from emberd.compile.quantize.recipes import RECIPES
from relax_functions import Array, calls, function, random, run
from tvm import relax
from tvm.relax import op

ISA = host_isas()[0]
TOKENS, HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 3, 32, 64, 4, 2
ROWS = (TOKENS, HIDDEN)

ONE_KERNEL: list[tuple[str, list[Scalar], list[Array], tuple[int, ...]]] = [
    ("linear", [], [random(*ROWS), random(48, HIDDEN)], (TOKENS, 48)),
    ("linear", [], [random(1, HIDDEN), random(48, HIDDEN), random(1, 48)], (1, 48)),
    ("embedding", [], [np.array([8, 0, 4], np.int32), random(9, HIDDEN)], ROWS),
    ("gated_activation", ["silu"], [random(*ROWS), random(*ROWS, seed=1)], ROWS),
    ("gated_activation", ["sigmoid"], [random(1, 1, HIDDEN)] * 2, (1, 1, HIDDEN)),
    ("gated_sum", [], [random(TOKENS, 1), *(random(*ROWS, seed=i) for i in range(3))], ROWS),
    ("rms_norm", [1e-6, 1], [random(TOKENS, 2, HIDDEN), random(HIDDEN)], (TOKENS, 2, HIDDEN)),
    ("rms_norm", [1e-6, 0], [random(*ROWS), random(HIDDEN), random(*ROWS, seed=1)], ROWS),
]

IDS = np.array([[3, 0], [1, 2], [0, 3]], np.int32)
TABLE = np.array([2, 0, 3, 1], np.int32)
GATE_UP = random(EXPERTS, 2 * INTERMEDIATE, HIDDEN) / 4
DOWN = random(EXPERTS, HIDDEN, INTERMEDIATE) / 4


def _function(
    name: str, scalars: list[Scalar], arguments: list[Array], result: Any, *weights: str
) -> tvm.IRModule:
    """One call of an operator; the last parameters have the names of `weights`."""
    names = [f"argument{i}" for i in range(len(arguments) - len(weights))] + list(weights)
    kinds = [tensor(array.shape, str(array.dtype)) for array in arguments]
    return function(
        dict(zip(names, kinds, strict=True)),
        lambda emit, *tensors: operators.call(name, tensors, scalars, result),
    )


def _lowered(module: tvm.IRModule) -> tuple[tvm.IRModule, KernelLibrary]:
    return _lowered_quantised(quantise(RECIPES["f32"], "moe")(module))


def _lowered_quantised(module: tvm.IRModule) -> tuple[tvm.IRModule, KernelLibrary]:
    library = KernelLibrary()
    with tvm.target.Target(ISA.target):
        return lower_kernels(ISA, library)(module), library


@pytest.mark.parametrize(
    ("name", "scalars", "arguments", "shape"),
    ONE_KERNEL,
    ids=[f"{case[0]}{i}" for i, case in enumerate(ONE_KERNEL)],
)
def test_a_kernel_computes_what_the_operator_means(
    name: str, scalars: list[Scalar], arguments: list[Array], shape: tuple[int, ...]
) -> None:
    before = _function(name, scalars, arguments, tensor(shape))
    after, library = _lowered(before)
    (symbol,) = library.builders
    assert symbol.startswith(name) and symbol.endswith("_t1" if shape[0] == 1 else "_tn")
    assert not any(call.startswith(operators.PREFIX) for call in calls(after))
    got = run(after, *arguments, target=ISA.target)
    np.testing.assert_allclose(got, run(before, *arguments), rtol=1e-4, atol=1e-5)


def test_a_router_gives_ids_weights_and_scores() -> None:
    arguments = [random(*ROWS), random(EXPERTS, HIDDEN)]
    result = [
        tensor([TOKENS, TOP_K], "int32"),
        tensor([TOKENS, TOP_K]),
        tensor([TOKENS, padded(EXPERTS)]),
    ]
    before = _function("router", [TOP_K], arguments, result)
    after, library = _lowered(before)
    assert len(library.builders) == 1
    ids, *floats = run(after, *arguments, target=ISA.target)
    expected_ids, *expected_floats = run(before, *arguments)
    np.testing.assert_array_equal(ids, expected_ids)
    for got, expected in zip(floats, expected_floats, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5)


@pytest.mark.parametrize("fused", [True, False])
def test_experts_are_read_from_the_bank(fused: bool) -> None:
    blobs = [pack_expert(FORMATS["f32"], *pair) for pair in zip(GATE_UP, DOWN, strict=True)]
    bank = np.empty((EXPERTS, len(blobs[0])), np.uint8)
    bank[TABLE] = blobs
    if fused:
        scores = random(TOKENS, padded(EXPERTS))
        inputs, result = [random(*ROWS), IDS, random(TOKENS, TOP_K), scores], tensor(ROWS)
        names, weights = ("experts_gate_up", "experts_down"), [GATE_UP, DOWN]
    else:
        inputs, result = [IDS], tensor([TOKENS, TOP_K, *GATE_UP.shape[1:]])
        names, weights = ("experts_gate_up",), [GATE_UP]
    name = "moe" if fused else "gather_experts"
    before = _function(name, [], [*inputs, *weights], result, *names)
    after, library = _lowered(before)
    kernels = {symbol.split("_n")[0].split("_f32")[0] for symbol in library.builders}
    assert kernels == ({"expert_outputs", "weighted_sum"} if fused else {"gather_experts"})
    assert {symbol.split("_f32")[0] for symbol in library.in_waves} == kernels & {"expert_outputs"}
    got = run(after, *inputs, TABLE, bank, target=ISA.target)
    np.testing.assert_allclose(got, run(before, *inputs, *weights), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("tokens", "kernels"),
    [(1, ["moe"]), (TOKENS, ["expert_outputs", "shared_expert", "weighted_sum_shared"])],
)
def test_a_shared_expert_is_computed_beside_those_of_the_bank(
    tokens: int, kernels: list[str]
) -> None:
    blobs = [pack_expert(FORMATS["f32"], *pair) for pair in zip(GATE_UP, DOWN, strict=True)]
    bank, table, rows = np.stack(blobs), np.arange(EXPERTS, dtype=np.int32), (tokens, HIDDEN)
    shared = [random(48, HIDDEN), random(48, HIDDEN, seed=1), random(HIDDEN, 48)]
    arguments = [random(*rows), IDS[:tokens], random(tokens, TOP_K)]
    arguments += [random(tokens, padded(EXPERTS)), *shared]
    arguments += [random(1, HIDDEN), random(*rows, seed=1), table, bank]
    scalars: list[Scalar] = ["f32", HIDDEN, INTERMEDIATE, EXPERTS, "float32", 48]
    before = _function("moe", scalars, arguments, tensor(rows))
    after, library = _lowered_quantised(before)
    assert sorted(symbol.split("_f32")[0].split("_n")[0] for symbol in library.builders) == kernels
    got = run(after, *arguments, target=ISA.target)
    np.testing.assert_allclose(got, run(before, *arguments), rtol=1e-4, atol=1e-4)


def test_states_are_updated_in_place_and_come_last() -> None:
    x, weight, state = random(*ROWS), random(HIDDEN, 4), random(3, HIDDEN)
    result = [tensor(x.shape), tensor(state.shape)]
    after, library = _lowered(_function("causal_convolution", [], [x, weight, state], result))
    assert calls(after) == ["relax.call_tir_inplace"]
    ((symbol, single),) = library.of_one_token.items()
    assert symbol.removesuffix("_tn") == single.removesuffix("_t1")
    assert set(library.builders) == {symbol, single}
    expected, next_state = causal_convolution.reference(x, weight, state)
    y, updated = run(after, x, weight, state, target=ISA.target)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(updated, next_state, rtol=1e-6)


@pytest.mark.parametrize(("shared_ids", "acquires"), [(True, 1), (False, 2)])
def test_chosen_experts_are_acquired_once_before_they_are_read(
    shared_ids: bool, acquires: int
) -> None:
    ids = tensor([TOKENS, TOP_K], "int32")
    parameters = {
        "ids": ids,
        "others": ids,
        "experts_gate_up": GATE_UP.shape,
        "experts_down": DOWN.shape,
    }

    def body(emit: Any, ids: Any, others: Any, gate_up: Any, down: Any) -> Any:
        pairs = [(ids, gate_up), (ids if shared_ids else others, down)]
        return tuple(
            operators.call(
                "gather_experts",
                list(pair),
                [],
                tensor([TOKENS, TOP_K, *operators.static_shape(pair[1])[1:]]),
            )
            for pair in pairs
        )

    after, library = _lowered(function(parameters, body))
    bindings = [binding for block in after["main"].body.blocks for binding in block.bindings]
    acquired = [b.var for b in bindings if _is_call(b.value, "relax.call_tir_inplace")]
    read = [b.value.args[1][0] for b in bindings if _is_call(b.value, "relax.call_tir")]
    assert len(acquired) == acquires and len(read) == 2
    assert set(read) == set(acquired)
    assert [len(b.value.args[1]) for b in bindings if b.var in acquired] == [3] * acquires
    assert not any("acquire" in symbol for symbol in library.builders)  # it is the core's


def _is_call(value: relax.Expr, name: str) -> bool:
    return isinstance(value, relax.Call) and value.op.name == name


def test_standard_operators_are_left_alone() -> None:
    before = function({"x": ROWS}, lambda emit, x: op.tanh(op.add(x, x)))
    after, library = _lowered(before)
    assert calls(after) == calls(before)
    assert library.builders == {}


@pytest.mark.parametrize(
    ("shape", "axis", "symbol"),
    [
        ((TOKENS, 2, 24), -1, "split_n8_n16_tn"),
        ((TOKENS, 24), 1, "split_n8_n16_tn"),
        ((1, 24), -1, "split_n8_n16_t1"),
        ((24, TOKENS), 0, None),
    ],
)
def test_columns_are_split_of_as_many_rows_as_there_are(
    shape: tuple[int, ...], axis: int, symbol: str | None
) -> None:
    """Left to Relax, a prompt of a few tokens was split as one of the largest chunk."""
    x = random(*shape)
    before = function({"x": shape}, lambda emit, x: op.split(x, [8], axis=axis))
    after, library = _lowered(before)
    assert set(library.builders) == ({symbol} if symbol else set())
    for got, expected in zip(run(after, x, target=ISA.target), run(before, x), strict=True):
        np.testing.assert_array_equal(got, expected)
