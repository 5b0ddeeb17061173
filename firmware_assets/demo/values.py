"""Slot values of the command grammar and their split into training and held-out values.

A value belongs to the held-out split when the hash of its kind and text falls into one of six
buckets, so the two splits are disjoint by construction, whatever the seed of the generator.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import yaml

Split = Literal["train", "heldout"]
Language = Literal["en", "zh"]
Value = str | int | float

_WORDS: dict[str, list[str]] = {
    name: text.split()
    for name, text in yaml.safe_load(
        Path(__file__).with_name("words.yaml").read_text(encoding="utf-8")
    ).items()
}
COMMON_WORDS = _WORDS["common"]
PLACE_WORDS, PLACE_ENDINGS = _WORDS["places"], _WORDS["place_endings"]
SONG_WORDS, ARTIST_WORDS, SYLLABLES = _WORDS["songs"], _WORDS["artists"], _WORDS["syllables"]
SONG_GLUE = ("of the", "in the", "and", "for", "without", "on")
HANZI = "".join(_WORDS["hanzi"])
PLACE_SUFFIXES_ZH = (
    "路",
    "街",
    "大道",
    "机场",
    "公园",
    "医院",
    "酒店",
    "广场",
    "大厦",
    "火车站",
    "学校",
    "仓库",
)
RARE_HANZI = (0x4E00, 0x9FA5)  # first and last code point of the characters used as rare ones


def is_heldout(kind: str, value: Value) -> bool:
    """Whether ``value`` of slot ``kind`` belongs to the held-out split."""
    digest = hashlib.blake2s(f"{kind}:{value}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % 6 == 0


def _in_split(
    kind: str, split: Split, rng: random.Random, draw: Callable[[random.Random], Value]
) -> Value:
    """Draw until the value belongs to ``split``."""
    while True:
        value = draw(rng)
        if is_heldout(kind, value) == (split == "heldout"):
            return value


def _synthetic_word(rng: random.Random) -> str:
    return "".join(rng.choice(SYLLABLES) for _ in range(rng.choice((2, 2, 3)))).capitalize()


def _spliced_word(rng: random.Random) -> str:
    """The head of one listed word and the tail of another: breaks up what pieces go together."""
    head, tail = (
        rng.choice(PLACE_WORDS + SONG_WORDS + ARTIST_WORDS + COMMON_WORDS) for _ in range(2)
    )
    return (head[: rng.randint(1, 4)] + tail[rng.randint(1, 4) :]).capitalize()


def _random_word(rng: random.Random) -> str:
    """Letters in any order, so that copying does not depend on familiar syllables."""
    letters = "aaabcddeeeefghiiijkllmmnnnooopqrrrsssttttuuvwxyz"
    return "".join(rng.choice(letters) for _ in range(rng.randint(2, 8))).capitalize()


def _word(rng: random.Random, listed: list[str], split: Split) -> str:
    """A listed, synthetic, spliced or random word of ``split``: words themselves are held out."""
    kinds: tuple[Callable[[random.Random], str], ...] = (
        lambda r: r.choice(listed),
        lambda r: r.choice(listed),
        _synthetic_word,
        _spliced_word if split == "train" else _synthetic_word,
        _spliced_word if split == "train" else _synthetic_word,
        _random_word if split == "train" else _synthetic_word,
    )
    return str(_in_split("word", split, rng, rng.choice(kinds)))


def _hanzi(rng: random.Random, count: int, split: Split) -> str:
    """``count`` characters; the whole string, and any rare character in it, are of ``split``."""

    def draw(r: random.Random) -> str:
        text = "".join(r.choice(HANZI) for _ in range(count))
        if r.random() < (0.25 if split == "train" else 0.12):
            rare = str(_in_split("word", split, r, lambda s: chr(s.randint(*RARE_HANZI))))
            at = r.randrange(count)
            text = text[:at] + rare + text[at + 1 :]
        return text

    return str(_in_split("word", split, rng, draw))


def _cased(rng: random.Random, name: str) -> str:
    return name.lower() if rng.random() < 0.15 else name


def destination(rng: random.Random, split: Split, language: Language) -> str:
    """A place: a street with or without a house number, a building, a town."""
    if language == "zh":
        name = _hanzi(rng, rng.choice((1, 2, 2, 2, 3)), split) + rng.choice(PLACE_SUFFIXES_ZH)
        return f"{name}{rng.randint(1, 399)}号" if rng.random() < 0.2 else name
    name = _word(rng, PLACE_WORDS, split)
    if rng.random() < 0.3:
        name = f"{name} {_word(rng, PLACE_WORDS, split)}"
    if rng.random() < 0.75:
        name = f"{name} {rng.choice(PLACE_ENDINGS)}"
        if rng.random() < 0.25:
            name = f"{rng.randint(1, 399)} {name}"
    return _cased(rng, name)


def title(rng: random.Random, split: Split, language: Language) -> str:
    """A song title."""
    if language == "zh" and rng.random() < 0.85:
        return _hanzi(rng, rng.randint(2, 5), split)
    words = [_word(rng, SONG_WORDS, split) for _ in range(rng.choice((1, 2, 2, 3)))]
    if len(words) > 1 and rng.random() < 0.3:
        words.insert(1, rng.choice(SONG_GLUE))
    return _cased(rng, " ".join(words))


def artist(rng: random.Random, split: Split, language: Language) -> str:
    """A singer or a band."""
    if language == "zh" and rng.random() < 0.85:
        return _hanzi(rng, rng.randint(2, 3), split)
    name = " ".join(_word(rng, ARTIST_WORDS, split) for _ in range(rng.choice((1, 2, 2))))
    return _cased(rng, f"The {name}" if rng.random() < 0.2 else name)


def machine(rng: random.Random, split: Split, language: Language) -> str:
    """A machine id such as ``PX-204`` or ``R7-12``."""
    del language

    def draw(r: random.Random) -> str:
        letters = "".join(r.choice("ABCDEFGHKLMNPRSTVWX") for _ in range(r.choice((1, 2, 2, 3))))
        digits = "".join(r.choice("0123456789") for _ in range(r.choice((1, 2, 2, 3, 4))))
        return f"{letters}-{digits}"

    return str(_in_split("machine", split, rng, draw))


def code(rng: random.Random, split: Split, language: Language) -> str:
    """A fault code such as ``E1042``."""
    del language

    def draw(r: random.Random) -> str:
        digits = "".join(r.choice("0123456789") for _ in range(r.choice((2, 3, 3, 4))))
        return f"{r.choice('EFAWPU')}{digits}"

    return str(_in_split("code", split, rng, draw))


def temperature(rng: random.Random, split: Split, language: Language) -> Value:
    """A cabin temperature in degrees Celsius, whole or half."""
    del language

    def draw(r: random.Random) -> Value:
        return r.randint(16, 30) + (0.5 if r.random() < 0.2 else 0)

    return _in_split("temperature", split, rng, draw)


def volume(rng: random.Random, split: Split, language: Language) -> Value:
    """A loudness in percent."""
    del language
    return _in_split("volume", split, rng, lambda r: r.randint(1, 99))


def hours(rng: random.Random, split: Split, language: Language) -> Value:
    """A span of a history in hours."""
    del language
    return _in_split("hours", split, rng, lambda r: r.randint(2, 72))


def frequency(rng: random.Random, split: Split, language: Language) -> Value:
    """A radio frequency in MHz."""
    del language
    return _in_split("frequency", split, rng, lambda r: r.randint(875, 1080) / 10)


def fan_level(rng: random.Random, split: Split, language: Language) -> Value:
    """A fan level; too few values to hold any out."""
    del split, language
    return rng.randint(1, 7)


def seat_level(rng: random.Random, split: Split, language: Language) -> Value:
    """A seat heating level; too few values to hold any out."""
    del split, language
    return rng.randint(1, 3)


OPEN_SLOTS: dict[str, Callable[[random.Random, Split, Language], Value]] = {
    "destination": destination,
    "stop": destination,
    "title": title,
    "artist": artist,
    "machine": machine,
    "code": code,
    "temperature": temperature,
    "volume": volume,
    "hours": hours,
    "frequency": frequency,
    "fan_level": fan_level,
    "seat_level": seat_level,
}
