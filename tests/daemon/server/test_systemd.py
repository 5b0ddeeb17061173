"""Sockets from systemd, and telling it that the daemon is up."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
from emberd.daemon.errors import EmberdError
from emberd.daemon.server import systemd

# Becomes the daemon as systemd starts it: with the right LISTEN_PID and the socket as number 3.
LAUNCH = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.environ["LISTEN_PID"] = str(os.getpid())
os.execv(sys.executable, [sys.executable, "-m", "emberd.daemon.cli", *sys.argv[2:]])
"""


@contextlib.contextmanager
def _activated(
    artifact: Path, passed: socket.socket, **environment: str
) -> Iterator[subprocess.Popen[str]]:
    number = passed.fileno()
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCH, str(number), "serve", str(artifact)],
        pass_fds=[number],
        env=os.environ | {"LISTEN_FDS": "1"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("kind", ["tcp", "unix"])
async def test_who_connects_before_the_daemon_is_up_is_answered(
    demo_artifact: Path, tmp_path: Path, kind: str
) -> None:
    with socket.socket(socket.AF_INET if kind == "tcp" else socket.AF_UNIX) as passed:
        passed.bind(("127.0.0.1", 0) if kind == "tcp" else str(tmp_path / "socket"))
        passed.listen()
        address = passed.getsockname()
        path = None if kind == "tcp" else address
        connector = None if path is None else aiohttp.UnixConnector(path)
        url = f"http://127.0.0.1:{address[1]}" if kind == "tcp" else "http://x"
        async with aiohttp.ClientSession(connector=connector) as http:
            body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
            waiting = asyncio.create_task(http.post(f"{url}/v1/chat/completions", json=body))
            await asyncio.sleep(0.05)  # it connects, to a socket that nobody accepts from
            with _activated(demo_artifact, passed) as process:
                assert (await waiting).status == 200
                assert process.stdout is not None
                where = f"http://127.0.0.1:{address[1]}" if path is None else f"unix:{path}"
                assert process.stdout.readline() == f"emberd: demo on {where}\n"


async def test_who_connects_while_the_daemon_ends_is_answered(demo_artifact: Path) -> None:
    """By it, which had let the connection in, or by the next one."""
    with socket.socket() as passed:
        passed.bind(("127.0.0.1", 0))
        passed.listen()
        url = f"http://127.0.0.1:{passed.getsockname()[1]}/v1/completions"
        with _activated(demo_artifact, passed) as process:
            assert process.stdout is not None and process.stdout.readline()
            process.send_signal(signal.SIGSTOP)  # the request and the end are there at once
            async with aiohttp.ClientSession() as http:
                body = {"prompt": "x", "max_tokens": 1}
                waiting = asyncio.create_task(http.post(url, json=body))
                await asyncio.sleep(0.05)  # it connects and asks
                process.send_signal(signal.SIGTERM)
                process.send_signal(signal.SIGCONT)
                assert await asyncio.to_thread(process.wait) == 0
                with _activated(demo_artifact, passed):
                    assert (await waiting).status == 200


@pytest.mark.parametrize("abstract", [True, False])
async def test_systemd_is_told_when_the_daemon_is_up(
    demo_artifact: Path, tmp_path: Path, abstract: bool
) -> None:
    with socket.socket() as passed, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
        passed.bind(("127.0.0.1", 0))
        passed.listen()
        address = f"{'@' if abstract else ''}{tmp_path}/notify"
        told.bind(f"\0{address[1:]}" if abstract else address)
        told.settimeout(30)
        with _activated(demo_artifact, passed, NOTIFY_SOCKET=address):
            assert await asyncio.to_thread(told.recv, 100) == b"READY=1"


def test_a_daemon_that_can_tell_nobody_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "none"))
    systemd.notify_ready()
    assert caplog.messages == [
        f"NOTIFY_SOCKET {tmp_path}/none cannot be told: No such file or directory"
    ]


def test_a_socket_that_does_not_listen(demo_artifact: Path) -> None:
    with socket.socket() as passed, _activated(demo_artifact, passed) as process:
        _, errors = process.communicate()
        assert process.returncode == 2
        assert errors.startswith("emberd: error: the socket that was passed does not listen")


def test_a_descriptor_that_is_no_socket(demo_artifact: Path) -> None:
    with _activated(demo_artifact, sys.stderr) as process:  # type: ignore[arg-type]  # has fileno
        _, errors = process.communicate()
        assert errors.startswith("emberd: error: what was passed as a socket is none")


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"LISTEN_PID": "1", "LISTEN_FDS": "1"},
        {"LISTEN_PID": str(os.getpid())},
        {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "0"},
    ],
)
def test_sockets_of_others_are_left_alone(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert systemd.passed_socket() is None


def test_several_sockets_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LISTEN_PID", str(os.getpid()))
    monkeypatch.setenv("LISTEN_FDS", "2")
    with pytest.raises(EmberdError, match="2 sockets were passed"):
        systemd.passed_socket()
