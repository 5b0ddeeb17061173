"""Who may ask: whoever has the API key, or, where there is none, who can reach the socket.

Any web page can have its own name lead to 127.0.0.1 (DNS rebinding) and would then be such a one:
without a key, connections over the loopback device have to address this machine by a name that
nobody else can own.
"""

from __future__ import annotations

import base64
import hmac
import ipaddress
import socket
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler
from emberd.daemon.server.api_error import ApiError
from emberd.daemon.server.keys import SERVING

_OWN_DOMAINS = (".localhost", ".local")  # which no public name server can answer for


@web.middleware
async def access(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Lets through what may be answered; of paths under /v1/ only, others give nothing away."""
    if not request.path.startswith("/v1/"):
        return await handler(request)
    key = request.app[SERVING].config.api_key.encode()
    if key and not hmac.compare_digest(_given_key(request.headers.get("Authorization", "")), key):
        raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key")
    host = request.headers.get("Host", "localhost")  # no browser leaves it out
    if not key and _is_local(request.get_extra_info("sockname")) and not _is_own(host):
        raise ApiError(
            403,
            f"Host {host:.80} is not a name of this machine: ask http://localhost, or set "
            "an api_key where a proxy passes its own name on",
            code="foreign_host",
        )
    return await handler(request)


def _given_key(authorization: str) -> bytes:
    """The bearer token; or the password of HTTP Basic, which is how browsers send one."""
    scheme, _, credentials = authorization.partition(" ")
    if scheme == "Bearer":
        return credentials.encode(errors="surrogateescape")
    if scheme != "Basic":
        return b""
    try:
        return base64.b64decode(credentials, validate=True).partition(b":")[2]
    except ValueError:
        return b""


def _is_local(address: Any) -> bool:
    """Whether a socket's address is of the loopback device; no Unix socket's is."""
    if not isinstance(address, tuple):
        return False
    parsed = ipaddress.ip_address(address[0])
    return (getattr(parsed, "ipv4_mapped", None) or parsed).is_loopback


def _is_own(host: str) -> bool:
    """Whether the value of a Host header is an address, or a name that only this network knows."""
    name = host.rpartition("]")[0].removeprefix("[") or host.partition(":")[0]
    try:
        ipaddress.ip_address(name)
    except ValueError:
        name = name.rstrip(".").lower()
        return name in ("localhost", socket.gethostname().lower()) or name.endswith(_OWN_DOMAINS)
    return True
