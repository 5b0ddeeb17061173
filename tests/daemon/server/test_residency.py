"""Expert budgets of a served model: settings, reloads, metrics, and disks that fail."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from emberd.daemon.artifact import Artifact
from emberd.daemon.cli import main
from emberd.daemon.config import Config
from emberd.daemon.errors import EmberdError
from emberd.daemon.experts import Residency
from emberd.daemon.policies import POLICIES
from emberd.daemon.server.run import take_reload
from emberd.daemon.server.service import load_service
from emberd.daemon.shortcuts import Shortcuts

MODEL = Path(__file__).parents[3] / "firmware_assets" / "demo" / "model"
EXPERT_BYTES = 24576  # of the embedded model, 64 of them
BODY = {
    "messages": [{"role": "user", "content": "Set the driver temperature to 23"}],
    "max_tokens": 12,
    "temperature": 0,
}


async def _ask(http: aiohttp.ClientSession, url: str) -> tuple[int, Any]:
    async with http.post(f"{url}/v1/chat/completions", json=BODY) as response:
        return response.status, await response.json()


async def _metrics(http: aiohttp.ClientSession, url: str) -> dict[str, float]:
    async with http.get(f"{url}/metrics") as response:
        lines = (await response.text()).splitlines()
    return {k: float(v) for k, v in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}


async def test_a_reload_changes_the_budget_and_no_answer(
    demo_artifact: Path, tmp_path: Path
) -> None:
    """Case R3, through the configuration of a running daemon."""
    path = tmp_path / "emberd.yaml"
    settings = {"port": 0, "threads": 1, "expert_policy": "layer-ahead"}  # needs no map
    settings["expert_budget"] = "1.5M"  # all experts
    path.write_text(json.dumps(settings))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "emberd.daemon.cli", "serve", str(demo_artifact)),
        *("--config", str(path)),
        stdout=PIPE,
        stderr=PIPE,
    )
    assert process.stdout is not None and process.stderr is not None
    try:
        url = (await process.stdout.readline()).decode().split()[-1]
        async with aiohttp.ClientSession() as http:
            _, first = await _ask(http, url)
            assert (await _metrics(http, url))["emberd_expert_budget_bytes"] == 64 * EXPERT_BYTES
            for budget, slots, log in (
                (150_000, None, "emberd: the expert budget of 150000 bytes is below the token_dem"),
                (None, 6, "emberd: the configuration was reloaded: expert_budget is 150000"),
                (5, None, "emberd: the configuration was not reloaded: an expert budget of 5 byte"),
                ("9Q", None, "emberd: the configuration was not reloaded: "),
            ):
                if budget is not None:
                    path.write_text(json.dumps(settings | {"expert_budget": budget}))
                    process.send_signal(signal.SIGHUP)
                line = (await asyncio.wait_for(process.stderr.readline(), 10)).decode()
                assert line.startswith(log)
                status, answer = await _ask(http, url)
                assert (status, answer["choices"]) == (200, first["choices"])
                if slots:
                    values = await _metrics(http, url)
                    assert values["emberd_expert_budget_bytes"] == 150_000
                    for layer in range(4):
                        assert values[f'emberd_expert_misses_total{{layer="{layer}"}}'] > 0
                        read = values[f'emberd_expert_read_bytes_total{{layer="{layer}"}}']
                        assert read > 0 and read % EXPERT_BYTES == 0
            path.write_text(json.dumps(settings | {"slots": 5, "stall_deadline": "1e3"}))
            process.send_signal(signal.SIGHUP)
            for log in (
                "only a restart changes slots",
                "the configuration was reloaded: expert_budget is 1572864, stall_deadline is 1000",
            ):
                line = (await asyncio.wait_for(process.stderr.readline(), 10)).decode()
                assert line.startswith(f"emberd: {log}")
            path.write_text("")  # an editor begins to write it
            process.send_signal(signal.SIGHUP)
            line = (await asyncio.wait_for(process.stderr.readline(), 10)).decode()
            assert line.startswith(f"emberd: the configuration was not reloaded: {path}: empty;")
            values = await _metrics(http, url)
            assert values["emberd_expert_budget_bytes"] == 1_572_864
    finally:
        process.terminate()
        await process.wait()
    assert process.returncode == 0


def test_shortcuts_outlive_the_models_and_are_changed_with_the_budget_or_not_at_all(
    demo_artifact: Path,
) -> None:
    artifact, budget = Artifact.open(demo_artifact), 16 * EXPERT_BYTES
    residency = Residency(budget, 1, shortcuts=Shortcuts(routing_margin=1.0))

    def substituted() -> int:
        with residency.open(artifact, 1) as model, model.open_session(64) as session:
            for token in range(64):
                model.step_batch([session], [token])
            return sum(counters.substituted for counters in model.expert_counters())

    assert substituted() > 0
    with residency.open(artifact, 1) as model, model.open_session(64) as session:
        with pytest.raises(EmberdError, match="a step needs 2 experts"):
            residency.change(1, Shortcuts())
        assert residency.shortcuts == Shortcuts(routing_margin=1.0)
        with pytest.raises(EmberdError, match="a routing margin of 2"):
            residency.change(budget // 2, Shortcuts(routing_margin=2.0))
        assert residency.budget == model.expert_budget == budget
        residency.change(budget, Shortcuts())
        for token in range(64):
            model.step_batch([session], [token])
        assert sum(counters.substituted for counters in model.expert_counters()) == 0
    assert substituted() == 0


def test_shortcuts_that_the_model_cannot_take_are_refused_while_it_is_closed(
    tmp_path: Path,
) -> None:
    from emberd.compile.build import build

    build(MODEL, tmp_path / "artifact", "host", "q4", chunk_sizes=(1,), disabled=["moa_fusion"])
    residency = Residency(16 * EXPERT_BYTES, 1)
    artifact = Artifact.open(tmp_path / "artifact")
    residency.open(artifact, 1).close()
    for shortcuts in (Shortcuts(routing_margin=0.1), Shortcuts(stall_deadline=0.001)):
        with pytest.raises(EmberdError, match="needs an artifact built with moa_fusion"):
            residency.change(8 * EXPERT_BYTES, shortcuts)
    assert residency.budget == 16 * EXPERT_BYTES
    residency.change(8 * EXPERT_BYTES, Shortcuts(stall_weight=0.5))
    residency.open(artifact, 1).close()


async def test_a_reload_that_fails_unexpectedly_is_told_and_changes_nothing(
    demo_artifact: Path, run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    daemon = await run(load_service(demo_artifact, Config(threads=1)), None)

    def broken() -> Config:
        raise MemoryError("no room for a configuration")

    take_reload(daemon.service, broken)
    assert "the configuration was not reloaded" in caplog.text
    assert "MemoryError: no room for a configuration" in caplog.text
    assert (await _ask(daemon.http, daemon.url))[0] == 200
    assert daemon.service.config == Config(threads=1)


async def test_a_bank_that_cannot_be_read_fails_requests_and_not_the_daemon(
    demo_artifact: Path, tmp_path: Path, run: Any
) -> None:
    """Case R2."""
    folder = Path(shutil.copytree(demo_artifact, tmp_path / "demo"))
    config = Config(threads=1, expert_budget=10 * EXPERT_BYTES)
    daemon = await run(load_service(folder, config), None)
    _, good = await _ask(daemon.http, daemon.url)
    data = (folder / "experts.bin").read_bytes()
    os.truncate(folder / "experts.bin", 5 * EXPERT_BYTES)
    for _ in range(2):
        status, refusal = await _ask(daemon.http, daemon.url)
        assert status == 500
        assert "cannot be read: the file was truncated" in refusal["error"]["message"]
    with (folder / "experts.bin").open("r+b") as file:
        file.write(data)
    status, answer = await _ask(daemon.http, daemon.url)
    assert (status, answer["choices"]) == (200, good["choices"])


def test_a_budget_that_no_step_fits_keeps_the_daemon_from_starting(
    demo_artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "emberd.yaml"
    path.write_text("port: 0\nexpert_budget: 0\n")
    assert main(["serve", str(demo_artifact), "--config", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("emberd: error: ")
    assert line.endswith("an expert budget of 0 bytes: a step needs 2 experts at once, 49152 bytes")


def test_a_budget_outlives_the_models(demo_artifact: Path) -> None:
    artifact = Artifact.open(demo_artifact)
    residency = Residency(10 * EXPERT_BYTES, 1, policy=POLICIES["lru"])
    assert residency.counters() == []
    with residency.open(artifact, 1) as model, model.open_session(8) as session:
        session.step([1])
        assert [counters.misses for counters in residency.counters()] == [2] * 4
        with pytest.raises(EmberdError, match="a step needs 2 experts"):
            residency.set_budget(1)
        assert residency.budget == model.expert_budget == 10 * EXPERT_BYTES
    with pytest.raises(EmberdError, match="a step needs 49152 bytes at once"):
        residency.set_budget(2 * EXPERT_BYTES - 1)  # would keep the next model from opening
    residency.set_budget(7 * EXPERT_BYTES)
    with residency.open(artifact, 1) as model:
        assert model.expert_budget == 7 * EXPERT_BYTES


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("skipped", {"stall_deadline": 1e-6, "stall_weight": 1.0}),
        ("substituted", {"routing_margin": 1.0}),
    ],
)
async def test_shortcuts_are_kept_and_what_they_changed_is_told(
    run: Any, demo_artifact: Path, name: str, settings: dict[str, float]
) -> None:
    config = Config(threads=1, expert_budget=8 * EXPERT_BYTES, **settings)  # type: ignore[arg-type]
    daemon = await run(load_service(demo_artifact, config), None)
    assert (await _ask(daemon.http, daemon.url))[0] == 200
    async with daemon.http.get(f"{daemon.url}/v1/experts") as response:
        counts = [layer[name] for layer in (await response.json())["by_layer"]]
    values = await _metrics(daemon.http, daemon.url)
    assert min(counts[1:]) > 0
    for layer, count in enumerate(counts):
        assert values[f'emberd_expert_{name}_total{{layer="{layer}"}}'] == count
