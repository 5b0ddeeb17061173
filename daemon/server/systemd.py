"""What systemd passes to a service and wants to hear from it: sd_listen_fds(3) and sd_notify(3)."""

from __future__ import annotations

import logging
import os
import socket

from emberd.daemon.errors import EmberdError

_FIRST_DESCRIPTOR = 3  # SD_LISTEN_FDS_START

log = logging.getLogger("emberd")


def passed_socket() -> socket.socket | None:
    """The listening socket that this process was started with, if it was; to be asked for once.

    Raises EmberdError where there are several, or where it is none to listen on.
    """
    pid, count = os.environ.pop("LISTEN_PID", ""), os.environ.pop("LISTEN_FDS", "")
    os.environ.pop("LISTEN_FDNAMES", None)
    if pid != str(os.getpid()) or count in ("", "0"):
        return None
    if count != "1":
        raise EmberdError(f"{count} sockets were passed: the socket unit may have one ListenStream")
    os.set_inheritable(_FIRST_DESCRIPTOR, False)
    try:
        passed = socket.socket(fileno=_FIRST_DESCRIPTOR)
        listening = passed.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError as error:
        raise EmberdError(f"what was passed as a socket is none: {error.strerror}") from None
    if not listening or passed.type != socket.SOCK_STREAM:
        raise EmberdError("the socket that was passed does not listen: it must be a ListenStream")
    return passed


def notify_ready() -> None:
    """Tells systemd, if it waits for that, that the service is up."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
            abstract = address.startswith("@")
            try:
                notify.sendto(b"READY=1", f"\0{address[1:]}" if abstract else address)
            except OSError as error:  # the service is up all the same
                log.warning("NOTIFY_SOCKET %s cannot be told: %s", address, error.strerror or error)
