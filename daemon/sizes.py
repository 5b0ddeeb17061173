"""Amounts of memory and rates as people write them: 6G, 400MB/s."""

from __future__ import annotations

import re

from emberd.daemon.errors import EmberdError

_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
# Digits that a float holds exactly.
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)\s*(?:([kmgt])(i?b?)|b)?", re.IGNORECASE)
_ACCEPTED = (
    "a number with K, M, G or T (or KiB, MiB, GiB, TiB: powers of 1024), with KB, MB, GB or TB "
    "(powers of 1000), or of bytes"
)


def read_size(text: str) -> int:
    """Bytes of 6G, 1.5GiB, 500MB or 4096. In any case of letters, K, M, G and T are powers of 1024
    as they are for systemd's MemoryMax=; only KB, MB, GB and TB are powers of 1000. Raises
    EmberdError."""
    count = _bytes(text.strip())
    if count is None:
        raise EmberdError(f"{text!r:.80} is not a size such as 6G: expected {_ACCEPTED}")
    return count


def read_rate(text: str) -> int:
    """Bytes per second of 400MB/s; the /s may be left out. Raises EmberdError."""
    count = _bytes(re.sub(r"\s*/s$", "", text.strip(), flags=re.IGNORECASE))
    if count is None:
        raise EmberdError(
            f"{text!r:.80} is not a rate such as 400MB/s: expected {_ACCEPTED}, then /s"
        )
    if not count:
        raise EmberdError(f"{text!r:.80}: a rate must be more than 0")
    return count


def is_bare(text: str) -> bool:
    """Whether a size or rate is given without a unit."""
    return text.strip()[-1:].isdigit()


def _bytes(text: str) -> int | None:
    """None where the text is no size."""
    match = _SIZE.fullmatch(text)
    if match is None:
        return None
    number, letter, rest = match.groups(default="")
    base = 1000 if rest.lower() == "b" else 1024
    return int(float(number) * base ** _POWERS[letter.lower()])
