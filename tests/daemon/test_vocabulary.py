"""The vocabulary's file: read as written, and refused when its tables are not as they must be."""

from __future__ import annotations

import struct
import unicodedata
from pathlib import Path
from typing import Any

import msgpack
import pytest
from emberd.compile.tokenizer import compile_tokenizer
from emberd.daemon.errors import EmberdError
from emberd.daemon.vocabulary import Vocabulary
from hypothesis import given
from hypothesis import strategies as st

DEMO = Path(__file__).parents[2] / "firmware_assets" / "demo" / "model"
TEXT = "Set the spindle's speed to 1200 rpm \u2014 s'il vous pla\u00eet \U0001f389"


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return compile_tokenizer((DEMO / "tokenizer.json").read_text(encoding="utf-8"))


def test_round_trip(vocabulary: Vocabulary) -> None:
    data = vocabulary.to_bytes()
    again = Vocabulary.from_bytes(data)
    assert again.to_bytes() == data
    assert again.added == vocabulary.added
    ids = again.encode(TEXT)
    assert ids == vocabulary.encode(TEXT)
    assert b"".join(map(again.piece, ids)).decode() == TEXT


def test_ids_that_are_no_token_have_no_bytes(vocabulary: Vocabulary) -> None:
    for token in (-1, 1 << 30, vocabulary.added[0].id):
        assert vocabulary.piece(token) == b""


@given(st.text())
def test_any_text_comes_back(vocabulary: Vocabulary, text: str) -> None:
    ids = vocabulary.encode(text)
    assert len(text) <= len(ids) * vocabulary.longest
    assert b"".join(map(vocabulary.piece, ids)).decode() == unicodedata.normalize("NFC", text)


def _changed(vocabulary: Vocabulary, **changes: Any) -> bytes:
    data: bytes = msgpack.packb(msgpack.unpackb(vocabulary.to_bytes()) | changes)
    return data


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"version": 1}, "version 1, this emberd reads 3"),
        ({"added": [{"text": "<x>", "id": -1, "special": 0}]}, "id is -1"),
        ({"pipeline": "{"}, "vocabulary.msgpack: "),
        ({"pipeline": 3}, "pipeline is not a string"),
        ({"byte_ids": b""}, "do not hold together"),
        ({"byte_ids": struct.pack("<256i", *[1 << 20] * 256)}, "do not hold together"),
        ({"first": b"\0" * 4}, "do not hold together"),
        ({"merges": b"\0" * 11}, "merges is not a packed table"),
        ({"merges": b"\0" * 12}, "do not hold together"),
        ({"piece_ends": b""}, "do not hold together"),
    ],
)
def test_tables_that_are_not_as_they_must_be(
    vocabulary: Vocabulary, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(EmberdError, match=reason):
        Vocabulary.from_bytes(_changed(vocabulary, **changes))


@pytest.mark.parametrize("data", [b"", b"{}", b"\x90", b"\x80"])
def test_what_is_no_vocabulary(data: bytes) -> None:
    with pytest.raises(EmberdError, match=r"vocabulary\.msgpack"):
        Vocabulary.from_bytes(data)


@pytest.mark.parametrize("table", ["byte_ids", "first", "merges", "piece_ends"])
@given(st.data())
def test_damage_is_refused_or_harmless(
    vocabulary: Vocabulary, table: str, data: st.DataObject
) -> None:
    words = bytearray(msgpack.unpackb(vocabulary.to_bytes())[table])
    at = 4 * data.draw(st.integers(0, len(words) // 4 - 1))
    words[at : at + 4] = struct.pack(
        "<i", data.draw(st.sampled_from([-1, 0, 7, 1 << 30, -(1 << 31)]))
    )
    try:
        damaged = Vocabulary.from_bytes(_changed(vocabulary, **{table: bytes(words)}))
    except EmberdError:
        return
    for token in damaged.encode(TEXT):
        damaged.piece(token)
