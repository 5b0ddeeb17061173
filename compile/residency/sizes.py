"""Amounts of memory for people; daemon/sizes.py reads what they write."""

from __future__ import annotations


def size(count: float) -> str:
    """Bytes to three or four digits, in powers of 1000 as disks are sold."""
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count:.0f} bytes"
