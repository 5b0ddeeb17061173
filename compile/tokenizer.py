"""Compiles a checkpoint's tokenizer.json to the vocabulary of an artifact."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from emberd.compile.categories import library_categories
from emberd.daemon.errors import EmberdError
from emberd.daemon.pre_tokenizer import ALPHABET, spelled_bytes
from emberd.daemon.vocabulary import MERGE, AddedToken, Vocabulary
from tokenizers import Tokenizer as Reference

_UNSUPPORTED = (  # options of BPE that change what a text is encoded to
    "dropout",
    "unk_token",
    "continuing_subword_prefix",
    "end_of_word_suffix",
    "byte_fallback",
    "ignore_merges",
)
# Characters of which a normalizer may make one; in Unicode NFC there are up to 4 to compose.
_COMPOSED = {None: 1, "NFC": 4}
_SAMPLE = (
    "Set the driver's temperature to 23.5 \u00b0C, please!\n\n\tdef f(x):  return x**2  # I'LL\r\n"
    "\u00c5ngstr\u00f6m e\u0301te\u0301 \u0645\u0631\u062d\u0628\u0627 "
    "\u0928\u092e\u0938\u094d\u0924\u0947 \u6570\u63a7\u673a\u5e8a \ud55c\uad6d\uc5b4 "
    "\u3053\u3093\u306b\u3061\u306f \U0001f389\U0001f468\u200d\U0001f469   aaaaaaaaaaaaaaaa   "
)


def compile_tokenizer(tokenizer_json: str) -> Vocabulary:
    """Raises EmberdError where the text is not that of a byte-level BPE tokenizer, or of one with
    options that the daemon does not have."""
    try:
        data = json.loads(tokenizer_json)
        added = data["added_tokens"] or []
        model = data["model"]
        kinds = model["type"], (data["decoder"] or {}).get("type")
        tokens = [AddedToken(t["content"], t["id"], bool(t["special"])) for t in added]
        merges = [tuple(m.split(" ") if isinstance(m, str) else m) for m in model["merges"]]
        known: dict[str, int] = dict(model["vocab"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise EmberdError(f"tokenizer.json: not a tokenizer file ({error!r})") from error
    if kinds != ("BPE", "ByteLevel"):
        raise EmberdError(
            f"tokenizer.json: model {kinds[0]} with decoder {kinds[1]}; "
            "only byte-level BPE is supported"
        )
    if found := [option for option in _UNSUPPORTED if model.get(option)]:
        raise EmberdError(f"tokenizer.json: the option {found[0]} of BPE is not supported")
    _check_added(added)
    ids = {token.id for token in tokens}
    model["vocab"] = {piece: token for piece, token in known.items() if token not in ids}
    data |= {"added_tokens": [], "truncation": None, "padding": None}
    try:
        reference = Reference.from_str(json.dumps(data, ensure_ascii=False))
    except Exception as error:  # the library raises plain Exception
        raise EmberdError(f"tokenizer.json: {error}") from error
    vocabulary = Vocabulary(
        tokens,
        _pipeline(data),
        library_categories(),
        **_tables(model["vocab"], ids, merges),
        longest=_longest(model["vocab"], tokens, data["normalizer"]),
    )
    _compare(vocabulary, reference)
    return vocabulary


def _check_added(added: Sequence[Mapping[str, Any]]) -> None:
    for token in added:
        if len(token["content"]) < 2 or any(
            token.get(flag) for flag in ("single_word", "lstrip", "rstrip", "normalized")
        ):
            raise EmberdError(
                f"tokenizer.json: added token {token['content']!r}: single characters and the "
                "flags single_word, lstrip, rstrip and normalized are not supported"
            )


def _pipeline(data: Mapping[str, Any]) -> str:
    """The tokenizer without vocabulary: what happens to a text before it is encoded."""
    empty = {"type": "BPE", "vocab": {}, "merges": []}
    rest = {"post_processor": None, "decoder": None, "model": empty}
    return json.dumps({**data, **rest}, ensure_ascii=False, sort_keys=True)


def _tables(
    known: Mapping[str, int], added: set[int], merges: Sequence[tuple[str, ...]]
) -> dict[str, bytes]:
    """The tables of Vocabulary, packed."""
    pieces = [b""] * (1 + max([*known.values(), *added], default=-1))
    try:
        for text, token in known.items():
            pieces[token] = spelled_bytes(text)
        ranked = {
            (known[left], known[right]): (rank, known[left + right])
            for rank, (left, right) in enumerate(merges)
        }
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise EmberdError(f"tokenizer.json: vocabulary or merges: {error!r}") from error
    first = [0] * (len(pieces) + 1)
    for left, _ in ranked:
        first[left + 1] += 1
    return {
        "pieces": b"".join(pieces),
        "piece_ends": _packed(accumulate(map(len, pieces))),
        "byte_ids": _packed(known.get(character, -1) for character in ALPHABET),
        "first": _packed(accumulate(first)),
        "merges": b"".join(
            MERGE.pack(right, rank, token) for (_, right), (rank, token) in sorted(ranked.items())
        ),
    }


def _longest(
    known: Mapping[str, int], added: Sequence[AddedToken], normalizer: Mapping[str, Any] | None
) -> int:
    """Vocabulary.longest: of the bytes of a token, each may be a character."""
    kind = None if normalizer is None else normalizer.get("type")
    if kind not in _COMPOSED:
        return 0
    return _COMPOSED[kind] * max(map(len, [*known, *(token.text for token in added)]), default=0)


def _packed(values: Iterable[int]) -> bytes:
    items = list(values)
    return struct.pack(f"<{len(items)}i", *items)


def _compare(vocabulary: Vocabulary, reference: Reference) -> None:
    """Whatever else a tokenizer does that the daemon does not shows here."""
    try:
        found = list(vocabulary.encode(_SAMPLE))
    except UnicodeEncodeError as error:
        raise EmberdError(f"tokenizer.json: its pre-tokenizer is not byte-level: {error}") from None
    if found != reference.encode(_SAMPLE, add_special_tokens=False).ids:
        raise EmberdError("tokenizer.json: it encodes text as the daemon cannot")
