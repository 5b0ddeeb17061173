"""Disks that stop, slow down, break, vanish, are full or read-only under a daemon that reads."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from emberd.daemon.activation_map import MAP_FILE
from emberd.daemon.artifact import Artifact
from needs import lacking

HERE = Path(__file__).parent
DEMO = HERE.parents[2] / "firmware_assets" / "demo"
EXPERT_BYTES = 24576  # of the embedded model, 64 of them
SECONDS = 30.0  # for anything that should be done soon
BODY = {
    "messages": [{"role": "user", "content": "Set the driver temperature to 23"}],
    "max_tokens": 12,
    "temperature": 0,
}


@pytest.fixture(scope="module")
def preloaded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """disk.c as a library."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        lacking("there is no C compiler")
    library = tmp_path_factory.mktemp("disk") / "disk.so"
    flags = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run(
        [str(compiler), *flags, str(HERE / "disk.c"), "-o", str(library), "-ldl"], check=True
    )
    return library


@dataclass
class Daemon:
    """A daemon whose disk is at hand."""

    process: Process
    url: str
    http: aiohttp.ClientSession
    disk: Path

    def stop(self) -> None:
        (self.disk / "reached").unlink(missing_ok=True)
        (self.disk / "stopped").touch()

    def go_on(self) -> None:
        (self.disk / "stopped").unlink()

    async def reached(self) -> None:
        """Until a read is held back."""
        async with asyncio.timeout(SECONDS):
            while not (self.disk / "reached").exists():
                await asyncio.sleep(0.002)

    async def ask(self, **fields: Any) -> tuple[int, Any]:
        async with self.http.post(
            f"{self.url}/v1/chat/completions", json=BODY | fields
        ) as response:
            return response.status, await response.json()

    async def health(self) -> Any:
        async with self.http.get(f"{self.url}/health") as response:
            return await response.json()

    async def until(self, busy: int, queued: int = 0, loaded: bool = True) -> None:
        """Until so many requests are at work and wait."""
        async with asyncio.timeout(SECONDS):
            while True:
                health = await self.health()
                found = health["slots"]["busy"], health["queue"]["length"], health["model_loaded"]
                if found == (busy, queued, loaded):
                    return
                await asyncio.sleep(0.005)


@asynccontextmanager
async def serving(
    artifact: Path, folder: Path, preloaded: Path | None = None, *before: str, **settings: Any
) -> AsyncIterator[Daemon]:
    """`emberd serve` with few experts in memory and one slot; `before`: of the command's words."""
    path = folder / "emberd.yaml"
    few = {"port": 0, "threads": 1, "slots": 1, "expert_budget": 10 * EXPERT_BYTES}
    few["expert_policy"] = "layer-ahead"  # which lacks no map
    path.write_text(json.dumps(few | settings))
    environment = dict(os.environ, EMBERD_TEST_DISK=str(folder))
    if preloaded is not None:
        environment["LD_PRELOAD"] = str(preloaded)
    process = await asyncio.create_subprocess_exec(
        *(*before, sys.executable, "-m", "emberd.daemon.cli", "serve", str(artifact)),
        *("--config", str(path)),
        stdout=PIPE,
        stderr=PIPE,
        env=environment,
    )
    assert process.stdout is not None
    try:
        url = (await asyncio.wait_for(process.stdout.readline(), SECONDS)).decode().split()[-1]
        async with aiohttp.ClientSession() as http:
            yield Daemon(process, url, http, folder)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_a_disk_that_stops_delays_answers_and_nothing_else(
    demo_artifact: Path, tmp_path: Path, preloaded: Path
) -> None:
    async with serving(demo_artifact, tmp_path, preloaded) as daemon:
        status, good = await daemon.ask()
        assert status == 200
        daemon.stop()
        leaving = asyncio.create_task(daemon.ask(max_tokens=3000, ignore_eos=True))
        await daemon.reached()
        await daemon.until(busy=1)
        waiting = asyncio.create_task(daemon.ask())
        await daemon.until(busy=1, queued=1)
        for path in ("/metrics", "/v1/experts", "/v1/experts.html", "/v1/models"):
            async with daemon.http.get(daemon.url + path) as response:
                assert response.status == 200
        assert (await daemon.ask(temperature=-1))[0] == 400
        leaving.cancel()  # its client is gone: it ends with the read that it waits for
        await asyncio.gather(leaving, return_exceptions=True)
        assert not waiting.done()
        daemon.go_on()
        status, answer = await waiting
        assert (status, answer["choices"]) == (200, good["choices"])
        await daemon.until(busy=0)
        async with daemon.http.get(f"{daemon.url}/metrics") as response:
            assert 'emberd_requests_total{outcome="cancelled"} 1' in await response.text()
        daemon.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(daemon.process.wait(), SECONDS) == 0


async def test_a_slow_disk_delays_answers_and_changes_none(
    demo_artifact: Path, tmp_path: Path, preloaded: Path
) -> None:
    async with serving(demo_artifact, tmp_path, preloaded) as daemon:
        _, good = await daemon.ask()
        (tmp_path / "slow").touch()
        answers = await asyncio.gather(daemon.ask(), daemon.ask())  # one waits for the other
        assert [(status, answer["choices"]) for status, answer in answers] == [
            (200, good["choices"])
        ] * 2
        assert (await daemon.health())["status"] == "ok"


async def test_settings_are_reloaded_once_the_disk_goes_on(
    demo_artifact: Path, tmp_path: Path, preloaded: Path
) -> None:
    async with serving(demo_artifact, tmp_path, preloaded) as daemon:
        assert daemon.process.stderr is not None
        daemon.stop()
        asked = asyncio.create_task(daemon.ask())
        await daemon.reached()
        path = tmp_path / "emberd.yaml"
        changed = json.loads(path.read_text()) | {"expert_budget": 20 * EXPERT_BYTES}
        path.write_text(json.dumps(changed))
        daemon.process.send_signal(signal.SIGHUP)
        assert (await daemon.health())["status"] == "ok"
        daemon.go_on()
        assert (await asked)[0] == 200
        line = await asyncio.wait_for(daemon.process.stderr.readline(), SECONDS)
        assert line.endswith(b"expert_budget is %d\n" % (20 * EXPERT_BYTES))


@pytest.mark.parametrize("goes_on", [True, False])
async def test_sigterm_ends_a_daemon_whose_disk_has_stopped(
    demo_artifact: Path, tmp_path: Path, preloaded: Path, goes_on: bool
) -> None:
    drain = SECONDS if goes_on else 0.01
    async with serving(demo_artifact, tmp_path, preloaded, drain_seconds=drain) as daemon:
        daemon.stop()
        asked = asyncio.create_task(daemon.ask())
        await daemon.reached()
        daemon.process.send_signal(signal.SIGTERM)
        if goes_on:
            daemon.go_on()
            assert (await asked)[0] == 200
        else:
            with pytest.raises(aiohttp.ClientError):
                await asked
        assert daemon.process.stderr is not None
        errors = (await daemon.process.stderr.read()).decode()
        assert await asyncio.wait_for(daemon.process.wait(), SECONDS) == (0 if goes_on else 1)
        assert ("a step does not end" in errors) != goes_on


async def test_a_model_is_unloaded_after_the_reads_that_have_begun(
    demo_artifact: Path, tmp_path: Path, preloaded: Path
) -> None:
    """Those of the experts that its map tells to read ahead. A request meanwhile wakes it again."""
    folder, settings = with_map(demo_artifact, tmp_path / "demo"), {"expert_policy": "map-warmed"}
    async with serving(folder, tmp_path, preloaded, keep_alive=0, **settings) as daemon:
        await daemon.until(busy=0, loaded=False)
        daemon.stop()
        host, port = daemon.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: 2\r\n\r\n"
        writer.write(head.encode())  # which the model wakes for
        await daemon.reached()
        writer.write(b"{}")
        assert b" 400 " in await reader.readline()
        writer.close()
        await asyncio.sleep(0.05)
        asked = asyncio.create_task(daemon.ask())
        assert (await daemon.health())["model_loaded"]  # it is still being unloaded
        daemon.go_on()
        assert (await asked)[0] == 200
        await daemon.until(busy=0, loaded=False)


def with_map(artifact: Path, folder: Path) -> Path:
    """A copy of the demo's artifact that ships its activation map."""
    shutil.copytree(artifact, folder)
    data = (DEMO / MAP_FILE).read_bytes()
    (folder / MAP_FILE).write_bytes(data)
    manifest = json.loads((folder / "manifest.json").read_text())
    digest = hashlib.blake2b(data, digest_size=32).hexdigest()
    manifest["files"][MAP_FILE] = {"bytes": len(data), "blake2b": digest}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    Artifact.open(folder)
    return folder


async def test_a_disk_that_breaks_fails_requests_until_it_is_well_again(
    demo_artifact: Path, tmp_path: Path, preloaded: Path
) -> None:
    """Case R2, with errors of the disk itself: it is broken, or taken out."""
    async with serving(demo_artifact, tmp_path, preloaded) as daemon:
        _, good = await daemon.ask()
        (tmp_path / "broken").touch()
        for _ in range(2):
            status, refusal = await daemon.ask()
            assert status == 500
            assert "cannot be read: Input/output error" in refusal["error"]["message"]
        (tmp_path / "broken").unlink()
        status, answer = await daemon.ask()
        assert (status, answer["choices"]) == (200, good["choices"])


async def test_a_model_whose_disk_has_vanished_wakes_when_it_is_back(
    demo_artifact: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(demo_artifact, tmp_path / "demo"))
    async with serving(folder, tmp_path, keep_alive=0) as daemon:
        _, good = await daemon.ask()
        await daemon.until(busy=0, loaded=False)
        folder.rename(tmp_path / "gone")
        status, refusal = await daemon.ask()
        assert status == 500 and "the model cannot be opened" in refusal["error"]["message"]
        (tmp_path / "gone").rename(folder)
        status, answer = await daemon.ask()
        assert (status, answer["choices"]) == (200, good["choices"])


@pytest.mark.parametrize("full", [True, False], ids=["full", "read_only"])
async def test_a_disk_that_takes_no_byte_is_served_from(
    demo_artifact: Path, tmp_path: Path, full: bool
) -> None:
    """A file system in memory, in a mount namespace of the daemon's own."""
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    files = list(demo_artifact.iterdir())
    size = sum(path.stat().st_size + 4096 for path in files)
    last = f"cat /dev/zero > {mounted}/zeros" if full else f"mount -o remount,ro {mounted}"
    script = (
        f"mount -t tmpfs -o size={size} tmpfs {mounted} && cp {demo_artifact}/* {mounted} && {last}"
        f'; ! echo 1 > {mounted}/one && exec "$@"'
    )
    probe = ["unshare", "-m", "sh", "-c", f"mount -t tmpfs tmpfs {mounted}"]
    if shutil.which("unshare") is None or subprocess.run(probe, capture_output=True).returncode:
        lacking("mounting takes root")
    async with serving(demo_artifact, tmp_path) as daemon:
        _, good = await daemon.ask()
    before = ("unshare", "-m", "sh", "-c", script, "sh")
    async with serving(mounted, tmp_path, None, *before) as daemon:
        status, answer = await daemon.ask()
        assert (status, answer["choices"]) == (200, good["choices"])
