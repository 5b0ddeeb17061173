"""Idle models are unloaded and woken by requests; nothing else wakes them."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
from emberd.daemon.config import Config
from emberd.daemon.errors import EmberdError
from emberd.daemon.server.service import load_service

IDLE = 0.01  # seconds of keep_alive


async def _health(daemon: Any) -> Any:
    async with daemon.http.get(daemon.url + "/health") as response:
        return await response.json()


async def _unloaded(daemon: Any) -> None:
    await daemon.until(lambda load: not load.loaded)


async def test_an_unloaded_model_wakes_and_answers_as_before(serve: Any) -> None:
    daemon = await serve(keep_alive=IDLE)
    first = await daemon.chat()
    await _unloaded(daemon)
    again = await daemon.chat()
    assert again["choices"] == first["choices"]
    assert again["usage"] == first["usage"]
    assert daemon.service.engine.metrics.wakes >= 1


async def test_a_model_is_kept_for_ever_unless_told(start: Any) -> None:
    daemon = await start("hello")
    await daemon.chat()
    await asyncio.sleep(5 * IDLE)
    assert (await _health(daemon))["model_loaded"]


async def test_asking_how_it_is_wakes_nobody(start: Any) -> None:
    daemon = await start("hello", keep_alive=IDLE)
    await _unloaded(daemon)
    for path in ("/health", "/metrics", "/v1/models", "/v1/models/tiny", "/nowhere"):
        async with daemon.http.get(daemon.url + path) as response:
            await response.read()
    health = await _health(daemon)
    assert not health["model_loaded"] and health["status"] == "ok"
    assert health["slots"] == {"total": 2, "busy": 0}
    assert daemon.service.engine.metrics.wakes == 0


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_the_model_wakes_while_the_request_is_read(start: Any, path: str) -> None:
    daemon = await start("hello", keep_alive=0)
    await _unloaded(daemon)
    host, port = daemon.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 2\r\n\r\n".encode())
    await daemon.until(lambda load: load.loaded)
    await asyncio.sleep(5 * IDLE)
    assert daemon.service.engine.load.loaded  # although nothing of keep_alive is left
    writer.write(b"{}")
    assert b" 400 " in await reader.readline()
    writer.close()
    await _unloaded(daemon)


async def test_a_running_request_keeps_its_model(start: Any) -> None:
    daemon = await start("hello", keep_alive=0)
    daemon.model.gate.clear()
    running = asyncio.create_task(daemon.chat())
    await daemon.until(lambda load: load.busy)
    await asyncio.sleep(5 * IDLE)
    assert daemon.service.engine.load.loaded
    daemon.model.gate.set()
    assert (await running)["choices"][0]["message"]["content"] == "hello"
    await _unloaded(daemon)


async def test_a_model_that_cannot_wake_fails_its_requests_alone(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = await start("hello", keep_alive=0)
    await _unloaded(daemon)

    def fail(capacity: int) -> None:
        raise EmberdError("no memory for a session")

    with monkeypatch.context() as broken:
        broken.setattr(daemon.model, "open_session", fail)
        for _ in range(2):
            status, error = await daemon.refusal({"messages": [{"role": "user", "content": "x"}]})
            assert (status, error["code"]) == (500, "generation_failed")
            assert "no memory for a session" in error["message"]
    assert (await daemon.chat())["choices"][0]["message"]["content"] == "hello"
    assert daemon.service.engine.metrics.requests["failed"] == 2


async def test_another_artifact_in_the_folder_is_not_woken(
    demo_artifact: Path, tmp_path: Path, run: Any
) -> None:
    folder = Path(shutil.copytree(demo_artifact, tmp_path / "artifact"))
    daemon = await run(load_service(folder, Config(threads=1, keep_alive=0)), None)
    await _unloaded(daemon)
    manifest = folder / "manifest.json"
    manifest.write_text(manifest.read_text() + " ")
    status, error = await daemon.refusal({"messages": [{"role": "user", "content": "x"}]})
    assert status == 500 and "was replaced by another artifact" in error["message"]
