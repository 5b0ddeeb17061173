"""Builds kernels for every ISA of this machine and calls them with numpy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tvm
import tvm_ffi
from emberd.compile.isa.isa import Isa, host_isas
from numpy.typing import DTypeLike, NDArray

Array = NDArray[Any]

_ALIGNMENT = 64
_GUARD = 256  # bytes behind every array, checked after each call
_FILL = 0x7F  # as float32 a NaN: whatever is read before it is written shows


class Library:
    """Kernels built for one ISA; `library(symbol, *arrays)` calls one of them."""

    def __init__(self, isa: Isa, functions: Sequence[Any]) -> None:
        names = [str(function.attrs["global_symbol"]) for function in functions]
        assert len(set(names)) == len(names), "two kernels of one name"
        module = tvm.IRModule(dict(zip(names, functions, strict=True)))
        self._module = tvm.tirx.build(module, target=isa.target)
        assert "AllocWorkspace" not in self._module.inspect_source("ll"), "a stack array is too big"

    def __call__(self, symbol: str, *arrays: Array) -> None:
        self._module[symbol](*(tvm_ffi.from_dlpack(array) for array in arrays))
        for array in arrays:
            assert (_guard(array) == _FILL).all(), f"{symbol} wrote past the end of an array"


class Harness:
    """What the kernel tests use, so that they need not import one another."""

    @staticmethod
    def library(isa: Isa, functions: Sequence[Any]) -> Library:
        return Library(isa, functions)

    @staticmethod
    def empty(dtype: DTypeLike, shape: Sequence[int]) -> Array:
        """An uninitialised array, aligned as the core aligns buffers."""
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        memory = np.full(size + _ALIGNMENT + _GUARD, _FILL, np.uint8)
        start = -memory.ctypes.data % _ALIGNMENT
        return memory[start : start + size].view(dtype).reshape(shape)

    @classmethod
    def aligned(cls, array: Array) -> Array:
        """An aligned copy."""
        copy = cls.empty(array.dtype, array.shape)
        copy[...] = array
        return copy

    @classmethod
    def scratch(cls, specification: Sequence[tuple[str, Sequence[int]]]) -> list[Array]:
        """The tensors that a `<op>_scratch` asks for."""
        return [cls.empty(dtype, shape) for dtype, shape in specification]


def _guard(array: Array) -> Array:
    memory = array
    while memory.base is not None:
        memory = memory.base
    end = array.ctypes.data + array.nbytes - memory.ctypes.data
    return memory[end : end + _GUARD]


@pytest.fixture(scope="session")
def harness() -> Harness:
    return Harness()


@pytest.fixture(scope="session", params=host_isas(), ids=lambda isa: isa.name)
def isa(request: pytest.FixtureRequest) -> Isa:
    isa: Isa = request.param
    return isa
