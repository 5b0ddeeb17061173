"""Sound files are read as written; every kind of damage gives one clear error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import save_safetensors
from emberd.compile.checkpoint.safetensors import read_header
from emberd.daemon.errors import EmberdError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

SHARED_FOLDER = [HealthCheck.function_scoped_fixture]


def entry(
    begin: int, end: int, shape: list[int] | None = None, dtype: str = "F32"
) -> dict[str, Any]:
    shape = [(end - begin) // 4] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def write(file: Path, header: Any, data: int) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(data))
    return file


@settings(suppress_health_check=SHARED_FOLDER, deadline=None, max_examples=50)
@given(
    shapes=st.dictionaries(st.text(max_size=12), st.lists(st.integers(0, 5), max_size=4)),
    dtype=st.sampled_from(["F32", "F16", "BF16"]),
)
def test_every_tensor_is_found(tmp_path: Path, shapes: dict[str, list[int]], dtype: str) -> None:
    shapes.pop("__metadata__", None)
    weights = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    file = tmp_path / "model.safetensors"
    save_safetensors(file, weights, dtype)
    tensors = read_header(file)
    assert {tensor.name: list(tensor.shape) for tensor in tensors} == shapes
    content, one = file.read_bytes(), {"F32": b"\0\0\x80?", "F16": b"\0<", "BF16": b"\x80?"}[dtype]
    for tensor in tensors:
        assert content[tensor.offset :][: tensor.bytes] == one * tensor.elements


@settings(suppress_health_check=SHARED_FOLDER, deadline=None, max_examples=300)
@given(data=st.data())
def test_damage_is_refused_or_harmless(tmp_path: Path, data: st.DataObject) -> None:
    """Whatever a few wrong bytes do to a header, the tensors returned lie inside the file."""
    file = tmp_path / "model.safetensors"
    save_safetensors(file, {"a": np.ones((2, 3)), "b": np.ones(4), "c": np.ones(())})
    content = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    del content[data.draw(st.integers(len(content) - 40, len(content))) :]
    file.write_bytes(content)
    try:
        tensors = read_header(file)
    except EmberdError as error:
        assert str(file) in str(error)
        return
    assert sum(tensor.bytes for tensor in tensors) <= len(content)
    assert all(0 < tensor.offset <= len(content) - tensor.bytes for tensor in tensors)


@settings(suppress_health_check=SHARED_FOLDER, deadline=None, max_examples=200)
@given(
    header=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["a", "b", "dtype", "shape", "data_offsets", "__metadata__"]), inner
            )
        ),
    ),
    data=st.integers(0, 16),
)
def test_any_json_is_refused_or_tiles_the_file(tmp_path: Path, header: Any, data: int) -> None:
    file = write(tmp_path / "model.safetensors", header, data)
    try:
        tensors = read_header(file)
    except EmberdError as error:
        assert str(file) in str(error)
    else:
        assert sum(tensor.bytes for tensor in tensors) == data


@pytest.mark.parametrize(
    ("header", "data", "reason"),
    [
        ({"a": entry(0, 8), "b": entry(4, 12)}, 12, "tensor b overlaps a: expected it at byte"),
        ({"a": entry(0, 8), "b": entry(12, 16)}, 16, "tensor b leaves a gap after a"),
        ({"a": entry(4, 8)}, 8, "tensor a leaves a gap after the header"),
        ({"a": entry(0, 8)}, 4, "tensor a ends at byte .* truncated"),
        ({"a": entry(0, 8)}, 9, "1 bytes after the last tensor belong to none"),
        ({"a": entry(0, 8, [3])}, 8, r"shape \[3\] of F32 takes 12 bytes, .* span 8"),
        ({"a": entry(0, 8, [2**62, 2**62])}, 8, "takes .* bytes, but"),
        ({"a": entry(0, 8, [-2])}, 8, "expected a list of sizes as shape"),
        ({"a": entry(0, 8, [True, 2])}, 8, "expected a list of sizes as shape"),
        ({"a": entry(0, 8, [2.0])}, 8, "expected a list of sizes as shape"),  # type: ignore[list-item]
        ({"a": entry(0, 8, dtype="F31")}, 8, "tensor a: unknown dtype 'F31'"),
        ({"a": entry(8, 0, [2])}, 8, r"expected \[begin, end\] offsets, found \[8, 0\]"),
        ({"a": {**entry(0, 8), "data_offsets": [0, 4, 8]}}, 8, "offsets, found"),
        ({"a": {"dtype": "F32"}}, 0, "expected a list of sizes as shape, found None"),
        ({"a": 3}, 0, "tensor a: expected an object, found 3"),
        ([1], 0, "its header is not a JSON object"),
        (b"{", 0, "its header is not valid JSON"),
        (b"\xff{}", 0, "its header is not valid JSON"),
        (b"[" * 100_000, 0, "its header is not valid JSON"),
        (b'{"a": 1, "a": 2}', 0, "'a' appears twice"),
    ],
)
def test_wrong_headers_are_refused(tmp_path: Path, header: Any, data: int, reason: str) -> None:
    file = write(tmp_path / "model.safetensors", header, data)
    with pytest.raises(EmberdError, match=reason) as raised:
        read_header(file)
    assert str(file) in str(raised.value)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "0 bytes are too few"),
        (b"\1\2\3", "3 bytes are too few"),
        ((100).to_bytes(8, "little") + b"{}", "its header claims 100 bytes, but the file has 10"),
        (b"\xff" * 16, "its header claims 18446744073709551615 bytes"),
    ],
)
def test_wrong_lengths_are_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(EmberdError, match=reason):
        read_header(file)


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(EmberdError, match="cannot be read: Is a directory"):
        read_header(tmp_path)
