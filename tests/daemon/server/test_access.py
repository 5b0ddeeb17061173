"""Who may ask: API keys, and names of this machine."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from emberd.daemon.server.access import _is_local


async def _status(daemon: Any, path: str, **headers: str) -> int:
    async with daemon.http.get(daemon.url + path, headers=headers) as response:
        status: int = response.status
        if status == 403:
            assert (await response.json())["error"]["code"] == "foreign_host"
        return status


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("localhost:8080", 200),
        ("LocalHost.", 200),
        ("api.localhost", 200),
        ("box.local:80", 200),
        ("127.0.0.1:8080", 200),
        ("192.168.1.4", 200),
        ("[::1]:8080", 200),
        ("[::1]", 200),
        (socket.gethostname(), 200),
        ("rebound.example.com", 403),
        ("localhost.example.com:8080", 403),
        ("127.0.0.1.example.com", 403),
        ("[", 403),
        ("", 403),
    ],
)
async def test_without_a_key_the_host_must_be_this_machine(
    start: Any, host: str, status: int
) -> None:
    daemon = await start("x")
    assert await _status(daemon, "/v1/models", Host=host) == status
    assert await _status(daemon, "/health", Host=host) == 200


async def test_with_a_key_any_host_may_be_named(start: Any) -> None:
    daemon = await start("x", api_key="secret")
    assert await _status(daemon, "/v1/models", Host="example.com") == 401
    named = {"Host": "example.com", "Authorization": "Bearer secret"}
    assert await _status(daemon, "/v1/models", **named) == 200


@pytest.mark.parametrize(
    ("address", "local"),
    [
        (("127.0.0.1", 8080), True),
        (("127.8.0.1", 8080), True),
        (("::1", 8080, 0, 0), True),
        (("::ffff:127.0.0.1", 8080, 0, 0), True),
        (("fe80::1%eth0", 8080, 0, 2), False),
        (("192.168.1.4", 8080), False),
        ("/run/emberd.sock", False),
        (None, False),
    ],
)
def test_connections_over_the_loopback_device(address: Any, local: bool) -> None:
    assert _is_local(address) == local
