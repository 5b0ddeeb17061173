"""Take away what root may do, so that tests of permissions hold for everybody."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

_VERSION_3 = 0x20080522  # _LINUX_CAPABILITY_VERSION_3 of linux/capability.h


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Sets(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint32)
        for half in ("low", "high")
        for name in (f"effective_{half}", f"permitted_{half}", f"inheritable_{half}")
    )


@contextmanager
def without_capabilities() -> Iterator[None]:
    """The calling thread has no effective capabilities meanwhile: file permissions hold."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, sets = _Header(_VERSION_3, 0), _Sets()
    assert libc.capget(ctypes.byref(header), ctypes.byref(sets)) == 0
    none = _Sets.from_buffer_copy(sets)
    none.effective_low = none.effective_high = 0
    assert libc.capset(ctypes.byref(header), ctypes.byref(none)) == 0
    try:
        yield
    finally:
        assert libc.capset(ctypes.byref(header), ctypes.byref(sets)) == 0
