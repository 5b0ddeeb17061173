"""Amounts of memory and rates as people write them: 6G, 400MB/s, 25%."""

from __future__ import annotations

import re

from emberd.daemon.errors import EmberdError

_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"k": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kKMGT]?)(i?)B?")


def read_size(text: str) -> int:
    """Bytes of 6G, 500MB, 1.5GiB or 4096; G is 10^9 and Gi is 2^30. Raises EmberdError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or (match[3] and not match[2]):
        raise EmberdError(f"{text!r:.80} is not a size such as 6G, 500MB or 1.5GiB")
    unit = match[2].replace("K", "k")
    return int(float(match[1]) * (_BINARY[unit] if match[3] else _UNITS[unit]))


def read_rate(text: str) -> int:
    """Bytes per second of 400MB/s; the /s may be left out. Raises EmberdError."""
    rate = read_size(text.strip().removesuffix("/s"))
    if not rate:
        raise EmberdError(f"{text!r:.80}: a rate must be more than 0")
    return rate


def size(count: float) -> str:
    """Bytes to three or four digits, in powers of 1000 as disks are sold."""
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count:.0f} bytes"
