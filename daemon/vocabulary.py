"""The vocabulary of an artifact (vocabulary.msgpack): a checkpoint's tokenizer.json, compiled.

Reading a large tokenizer.json takes most of a second and 100 MB. Here its tables are used as they
lie in the file: pieces to look up, and merges that the core searches (native/vocabulary.c).
"""

from __future__ import annotations

import ctypes
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import msgpack
from emberd.daemon.bindings import Merges, core
from emberd.daemon.errors import EmberdError
from emberd.daemon.pre_tokenizer import Categories, read_pre_tokenizer
from emberd.daemon.record import INT32_MAX, Record

VOCABULARY = "vocabulary.msgpack"
VERSION = 3
MERGE = struct.Struct("<3i")  # right, rank, id: ember_merge of ember.h


@dataclass(frozen=True)
class AddedToken:
    """A token outside of byte-pair encoding; `special`: it never shows in text."""

    text: str
    id: int
    special: bool


class Vocabulary:
    """Tokens as bytes, and byte-pair encoding of words.

    Attributes:
        added: the added tokens.
        longest: no token stands for more characters of a text; 0 where that is not known.
    """

    def __init__(
        self,
        added: Sequence[AddedToken],
        pipeline: str,
        categories: Categories,
        pieces: bytes,
        piece_ends: bytes,
        byte_ids: bytes,
        first: bytes,
        merges: bytes,
        longest: int,
    ) -> None:
        """Raises EmberdError for tables that do not hold together.

        Args:
            pipeline: a tokenizer.json without a vocabulary: normalizer and pre-tokenizer.
            categories: of characters, by which the pre-tokenizer cuts.
            pieces, piece_ends: bytes of all tokens, and int32 where each one's end.
            byte_ids, first, merges: as in ember_vocabulary of ember.h.
        """
        self.added = tuple(added)
        self.longest = longest
        self._tables = {
            "longest": longest,
            "pipeline": pipeline,
            "category_starts": categories.starts,
            "categories": categories.letters,
            "pieces": pieces,
            "piece_ends": piece_ends,
            "byte_ids": byte_ids,
            "first": first,
            "merges": merges,
        }
        self._pieces = pieces
        self._ends = array("i", piece_ends)
        tokens = len(self._ends)
        self._merges = Merges(byte_ids, first, merges, tokens, len(merges) // MERGE.size)
        if (
            len(byte_ids) != 256 * 4
            or len(first) != (tokens + 1) * 4
            or not core.ember_vocabulary_check(ctypes.byref(self._merges))
        ):
            raise EmberdError(f"{VOCABULARY}: its tables do not hold together")
        try:
            self._pre_tokenizer = read_pre_tokenizer(pipeline, categories)
        except Exception as error:  # the library raises plain Exception
            raise EmberdError(f"{VOCABULARY}: {error}") from error

    @classmethod
    def from_bytes(cls, data: bytes) -> Vocabulary:
        """Reads vocabulary.msgpack; EmberdError says what is not as it must be."""
        try:
            top = msgpack.unpackb(data)
        except (ValueError, msgpack.exceptions.UnpackException, RecursionError) as error:
            raise EmberdError(f"{VOCABULARY} is not readable: {error}") from error
        record = Record(top, VOCABULARY)
        if (version := top.get("version")) != VERSION:
            raise EmberdError(
                f"{VOCABULARY}: version {version!r:.80}, this emberd reads {VERSION}: "
                "rebuild the artifact with a matching emberc"
            )
        try:
            categories = Categories(
                record.packed("category_starts", 4), record.packed("categories", 1)
            )
        except ValueError as error:
            raise EmberdError(f"{VOCABULARY}: {error}") from error
        return cls(
            added=[
                AddedToken(
                    token.string("text"),
                    token.integer("id", 0, INT32_MAX),
                    bool(token.integer("special", 0, 1)),
                )
                for token in record.records("added")
            ],
            pipeline=record.string("pipeline"),
            categories=categories,
            pieces=record.packed("pieces", 1),
            piece_ends=record.packed("piece_ends", 4),
            byte_ids=record.packed("byte_ids", 4),
            first=record.packed("first", 4),
            merges=record.packed("merges", MERGE.size),
            longest=record.integer("longest", 0, INT32_MAX),
        )

    def to_bytes(self) -> bytes:
        """vocabulary.msgpack; equal vocabularies give equal bytes."""
        added = [
            {"text": token.text, "id": token.id, "special": int(token.special)}
            for token in self.added
        ]
        packed: bytes = msgpack.packb({"version": VERSION, "added": added, **self._tables})
        return packed

    def piece(self, token: int) -> bytes:
        """The bytes of a token that is not an added one; nothing for unused ids."""
        if not 0 <= token < len(self._ends):
            return b""
        return self._pieces[self._ends[token - 1] if token else 0 : self._ends[token]]

    def encode(self, text: str) -> array[int]:
        """The tokens of a text, none of them added ones."""
        data, ends = self._pre_tokenizer.split(text)
        ids = array("i", bytes(4 * len(data)))
        count = core.ember_vocabulary_encode(
            ctypes.byref(self._merges),
            data,
            ends.buffer_info()[0],
            len(ends),
            ids.buffer_info()[0],
        )
        if count < 0:
            raise EmberdError(f"no memory to tokenise {len(data)} bytes")
        del ids[count:]
        return ids
