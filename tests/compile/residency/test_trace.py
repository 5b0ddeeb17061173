"""Trace files: what was appended is read, and nothing that is damaged."""

from __future__ import annotations

import resource
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from emberd.compile.residency.trace import CommandTrace, Trace, TraceHeader, TraceWriter
from emberd.daemon.errors import EmberdError

HEADER = TraceHeader("ab" * 32, layers=2, experts=6, top_k=3, expert_bytes=4096, next_layer=5)


def command(tokens: int, name: str = "media") -> CommandTrace:
    draw = np.random.default_rng(tokens)
    ids = np.argsort(draw.random((tokens, 2, 6)), axis=-1)[..., :3].astype(np.uint16)
    weights = draw.random((tokens, 2, 3)).astype(np.float16)
    expected = np.argsort(draw.random((tokens - tokens // 2, 1, 6)), axis=-1)[..., :5]
    return CommandTrace(name, tokens // 2, ids, weights, expected.astype(np.uint16))


def without_expected(tokens: int) -> CommandTrace:
    return replace(command(tokens), next_layer=None)


COMMANDS = [command(1), command(7, "climate"), without_expected(3), command(4)]


def write(path: Path, commands: list[CommandTrace]) -> list[int]:
    """Returns the size of the file after each."""
    writer = TraceWriter(path, HEADER)
    sizes = []
    for one in commands:
        writer.append(one)
        sizes.append(writer.sync())
    writer.finish(len(commands))
    writer.close()
    return sizes


def assert_equal(found: Trace, expected: list[CommandTrace]) -> None:
    assert found.header == HEADER
    for _ in range(2):
        read = list(found)
        assert len(read) == len(expected)
        for a, b in zip(read, expected, strict=True):
            assert (a.command_class, a.prompt) == (b.command_class, b.prompt)
            np.testing.assert_array_equal(a.ids, b.ids)
            np.testing.assert_array_equal(a.weights, b.weights)
            np.testing.assert_equal(a.next_layer, b.next_layer)


def test_round_trip(tmp_path: Path) -> None:
    write(tmp_path / "trace", COMMANDS)
    assert_equal(Trace(tmp_path / "trace"), COMMANDS)


def test_a_writer_goes_on_where_another_was_safe(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    sizes = write(path, COMMANDS)
    writer = TraceWriter(path, HEADER, sizes[0])
    writer.append(COMMANDS[2])
    writer.finish(2)
    writer.close()
    assert_equal(Trace(path), [COMMANDS[0], COMMANDS[2]])


def test_a_file_that_lost_its_end_cannot_be_gone_on_with(tmp_path: Path) -> None:
    sizes = write(tmp_path / "trace", COMMANDS)
    with pytest.raises(EmberdError, match="shorter than when it was left"):
        TraceWriter(tmp_path / "trace", HEADER, sizes[-1] + 100)


def test_a_file_that_cannot_grow_is_an_error(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "trace", HEADER)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(EmberdError, match="trace: File too large"):
            writer.append(command(9000))
            writer.sync()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def records(path: Path) -> list[Any]:
    with path.open("rb") as file:
        return list(msgpack.Unpacker(file))


@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        (0, lambda r: r.update(format="else"), "not a trace"),
        (0, lambda r: r.update(version=9), "version 9"),
        (0, lambda r: r.update(top_k=7), "top_k is 7"),
        (1, lambda r: r.update(ids=r["ids"][:-2]), "command 1: ids is not a packed table"),
        (1, lambda r: r.update(ids=b""), "command 1: ids: expected experts"),
        (2, lambda r: r.update(weights=r["weights"][:-12]), "command 2: ids: expected experts"),
        (1, lambda r: r.update(ids=b"\x06\0" + r["ids"][2:]), "experts below 6"),
        (1, lambda r: r.update(ids=b"\0\0" * 6), "an expert twice"),
        (1, lambda r: r.update(prompt=2), "prompt is 2"),
        (3, lambda r: r.pop("class"), "class is not a string"),
        (5, lambda r: r.update(commands=3), "commands is 3"),
        (0, lambda r: r.update(next_layer=7), "next_layer is 7"),
        (1, lambda r: r.update(next_layer=b"\x06\0" * 5), "next_layer: expected 5 experts below 6"),
        (1, lambda r: r.update(next_layer=bytes(10)), "next_layer: a token has an expert twice"),
        (2, lambda r: r.update(next_layer=r["next_layer"][2:]), "next_layer: expected 20 experts"),
    ],
)
def test_what_is_wrong_is_named(
    tmp_path: Path, index: int, change: Callable[[Any], Any], message: str
) -> None:
    path = tmp_path / "trace"
    write(path, COMMANDS)
    changed = records(path)
    change(changed[index])
    path.write_bytes(b"".join(map(msgpack.packb, changed)))
    with pytest.raises(EmberdError, match=message):
        list(Trace(path))


@pytest.mark.parametrize("count", range(len(COMMANDS) + 1))
@pytest.mark.parametrize("more", [0, 1, -1])
def test_a_file_cut_short_is_an_error(tmp_path: Path, count: int, more: int) -> None:
    """After a command, or inside the next record."""
    path = tmp_path / "trace"
    write(path, COMMANDS)
    *sizes, _ = accumulate(len(msgpack.packb(record)) for record in records(path))
    end = sizes[count] + more if more >= 0 else [*sizes, path.stat().st_size][count + 1] - 1
    path.write_bytes(path.read_bytes()[:end])
    found = iter(Trace(path))
    for _ in range(count):
        next(found)
    with pytest.raises(EmberdError, match=f"trace: ends after {count} commands"):
        next(found)


@pytest.mark.parametrize("data", [b"", b"\xc1", b"hello"])
def test_what_is_no_trace_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "trace").write_bytes(data)
    with pytest.raises(EmberdError, match="trace"):
        Trace(tmp_path / "trace")


def test_a_disk_that_is_full_at_the_end(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "trace", HEADER)
    writer.close()
    writer._file = Path("/dev/full").open("wb")  # noqa: SIM115 (closing it is what is tested)
    with pytest.raises(EmberdError, match="trace: No space left on device"):
        writer.finish(0)
    with pytest.raises(EmberdError, match="trace: No space left on device"):
        writer.close()


@pytest.mark.parametrize("data", [b"", b"root:x:0:0", b"\xc1", b"\x93\x01\x02\x03"])
def test_other_files_are_no_traces(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "trace"
    path.write_bytes(data)
    with pytest.raises(EmberdError, match=r"not a trace|damaged"):
        Trace(path)
