"""GET /v1/experts, on a model that tells about its experts and on one that does not."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from emberd.daemon.activation_map import MAP_FILE, ActivationMap
from emberd.daemon.config import Config
from emberd.daemon.core import Model
from emberd.daemon.errors import EmberdError
from emberd.daemon.server.service import load_service

MAP = Path(__file__).parents[3] / "firmware_assets" / "demo" / MAP_FILE
EXPERT_BYTES = 24576  # of the embedded model
CLASSES = ["climate", "diagnosis", "media", "navigation"]


def with_map(artifact: Path, folder: Path, data: bytes) -> Path:
    """A copy of the artifact, as if it had been built with this for a map."""
    copy = Path(shutil.copytree(artifact, folder / "artifact"))
    (copy / MAP_FILE).write_bytes(data)
    manifest = json.loads((copy / "manifest.json").read_text())
    digest = hashlib.blake2b(data, digest_size=32).hexdigest()
    manifest["files"][MAP_FILE] = {"bytes": len(data), "blake2b": digest}
    (copy / "manifest.json").write_text(json.dumps(manifest))
    return copy


async def experts(daemon: Any, query: str = "", status: int = 200) -> Any:
    async with daemon.http.get(f"{daemon.url}/v1/experts{query}") as response:
        assert response.status == status, await response.text()
        return await response.json()


async def serve(run: Any, artifact: Path) -> Any:
    return await run(load_service(artifact, Config(threads=1)), None)


async def test_a_model_that_does_not_tell(start: Any) -> None:
    daemon = await start("fine")
    assert await experts(daemon) == {
        "object": "experts",
        "model": "tiny",
        "loaded": False,
        "class": None,
        "classes": [],
    }
    error = await experts(daemon, "?class=media", 400)
    assert "no activation map" in error["error"]["message"]


async def test_mapped_experts_are_all_there_and_choices_are_counted(
    run: Any, demo_artifact: Path
) -> None:
    daemon = await serve(run, demo_artifact)
    before = await experts(daemon)
    assert before["loaded"] and before["budget_bytes"] is None and before["hit_rate"] is None
    assert (before["layers"], before["experts"], before["experts_per_token"]) == (4, 16, 2)
    assert before["token_demand_bytes"] == 8 * before["expert_bytes"]
    assert before["resident"] == 64 and before["classes"] == []
    usage = (await daemon.chat("set the driver side to 21 degrees", max_tokens=5))["usage"]
    after = await experts(daemon)
    read = usage["prompt_tokens"] + usage["completion_tokens"] - 1
    for layer, entry in enumerate(after["by_layer"]):
        assert entry["layer"] == layer and entry["resident"] == list(range(16))
        assert sum(entry["chosen"]) == 2 * read
        assert (entry["hits"], entry["misses"], "expected" in entry) == (0, 0, False)


async def test_a_budget_shows_in_residents_and_counters(run: Any, demo_artifact: Path) -> None:
    daemon = await serve(run, demo_artifact)
    model = daemon.service.engine.experts
    assert isinstance(model, Model)
    model.set_expert_budget(20 * model.experts.expert_bytes)
    model.expect_experts(False)  # so that nothing is read but what steps miss
    await daemon.chat("set the driver side to 21 degrees", max_tokens=9)
    report = await experts(daemon)
    layers = report["by_layer"]
    assert report["budget_bytes"] == 20 * report["expert_bytes"]
    assert report["resident"] == sum(len(entry["resident"]) for entry in layers) == 20
    hits, misses = (sum(entry[name] for entry in layers) for name in ("hits", "misses"))
    assert report["hit_rate"] == hits / (hits + misses)
    assert sum(entry["read_bytes"] for entry in layers) == misses * report["expert_bytes"]


def summed(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Of what nothing that is read ahead adds to."""
    names = ("hits", "misses", "stall_seconds")
    return {name: pytest.approx(sum(entry[name] for entry in entries)) for name in names}


async def test_costs_are_told_by_class_and_by_minute(
    run: Any, demo_artifact: Path, tmp_path: Path
) -> None:
    config = Config(threads=1, expert_budget=20 * EXPERT_BYTES, expert_policy="map-pinned")
    service = load_service(with_map(demo_artifact, tmp_path, MAP.read_bytes()), config)
    daemon = await run(service, None)
    before = await experts(daemon)
    assert [entry["class"] for entry in before["by_class"]] == [*CLASSES, None]
    assert before["policy"] == "map-pinned"
    assert before["minutes"] == []
    await daemon.chat("set the driver side to 21 degrees", max_tokens=9, **daemon.endless)
    first = await experts(daemon)
    by_class = {entry["class"]: entry for entry in first["by_class"]}
    layers = summed(first["by_layer"])
    assert {name: by_class["climate"][name] for name in layers} == layers
    for total, layer in zip(first["by_layer"], by_class["climate"]["layers"], strict=True):
        assert {name: layer[name] for name in layers} == {name: total[name] for name in layers}
    await daemon.chat("skip to the next song of the album", max_tokens=9, **daemon.endless)
    await daemon.chat("no more than one token is wanted of this", max_tokens=1)
    second = await experts(daemon)
    by_class = {entry["class"]: entry for entry in second["by_class"]}
    assert by_class["climate"]["hits"] == layers["hits"]
    assert by_class["media"]["hits"] > 0 < by_class[None]["hits"]
    assert summed(second["by_class"]) == {
        n: v.expected for n, v in summed(second["by_layer"]).items()
    }
    asked = sum(minute["hits"] + minute["misses"] for minute in second["minutes"])
    assert asked == sum(entry["hits"] + entry["misses"] for entry in second["by_layer"])
    async with daemon.http.get(f"{daemon.url}/metrics") as response:
        text = await response.text()
    hits = by_class["media"]["hits"]
    assert f'emberd_expert_class_hits_total{{class="media"}} {hits}\n' in text
    async with daemon.http.get(f"{daemon.url}/v1/experts.html") as response:
        assert "Hit rate by minute" in await response.text()


async def test_a_map_says_what_is_expected(run: Any, demo_artifact: Path, tmp_path: Path) -> None:
    daemon = await serve(run, with_map(demo_artifact, tmp_path, MAP.read_bytes()))
    found = ActivationMap.read(MAP)
    report = await experts(daemon)
    assert report["classes"] == [{"name": name, "prior": 0.25} for name in CLASSES]
    of_media = await experts(daemon, "?class=media")
    for layer in range(4):
        expected = report["by_layer"][layer]["expected"]
        assert expected == pytest.approx(found.mass(layer), abs=1e-5)
        expected = of_media["by_layer"][layer]["expected"]
        assert expected == pytest.approx(found.mass(layer, 2), abs=1e-5)
    error = await experts(daemon, "?class=games", 400)
    assert "has climate, diagnosis" in error["error"]["message"]


@pytest.mark.parametrize(
    ("settings", "alike"),
    [
        ({"expert_policy": "map-pinned"}, "map-pinned is as lru"),
        ({"expert_budget": 20 * EXPERT_BYTES}, "map-layer-ahead is as layer-ahead"),
        ({"expert_budget": 20 * EXPERT_BYTES, "expert_policy": "layer-ahead"}, None),
        ({}, None),
    ],
)
async def test_a_policy_that_lacks_a_map_does_what_it_can(
    run: Any,
    demo_artifact: Path,
    caplog: pytest.LogCaptureFixture,
    settings: dict[str, Any],
    alike: str | None,
) -> None:
    daemon = await run(load_service(demo_artifact, Config(threads=1, **settings)), None)
    told = [text for text in caplog.messages if "without an activation map" in text]
    assert len(told) == (alike is not None)
    assert alike is None or f"map, {alike}; emberc build --map ships one" in told[0]
    await daemon.chat("set the driver side to 21 degrees", max_tokens=3)


@pytest.mark.parametrize("name", ["predictor-retained", "pinned-retained", "read-ahead"])
def test_a_policy_that_lacks_a_predictor_is_refused(demo_artifact: Path, name: str) -> None:
    with pytest.raises(EmberdError, match=f"^{demo_artifact}: the policy {name} needs a predictor"):
        load_service(demo_artifact, Config(expert_policy=name))


def test_a_policy_of_a_newer_artifact_is_refused(demo_artifact: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(demo_artifact, tmp_path / "artifact"))
    manifest = json.loads((copy / "manifest.json").read_text())
    (copy / "manifest.json").write_text(json.dumps(manifest | {"expert_policy": "oracle"}))
    with pytest.raises(EmberdError, match=f"^{copy}: unknown policy 'oracle'; the daemon has lru"):
        load_service(copy, Config())
    load_service(copy, Config(expert_policy="lru")).engine.close()


async def test_a_map_of_another_model_is_said_and_left_out(
    run: Any, demo_artifact: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Case R4."""
    foreign = replace(ActivationMap.read(MAP), model="cd" * 32).to_bytes()
    daemon = await serve(run, with_map(demo_artifact, tmp_path, foreign))
    assert "going on without a map: the activation map was made for another model" in caplog.text
    assert (await experts(daemon))["classes"] == []
    await daemon.chat("set the driver side to 21 degrees", max_tokens=3)


async def test_the_page_is_html(run: Any, demo_artifact: Path, tmp_path: Path) -> None:
    daemon = await serve(run, with_map(demo_artifact, tmp_path, MAP.read_bytes()))
    async with daemon.http.get(f"{daemon.url}/v1/experts.html?class=media") as response:
        text = await response.text()
        assert response.status == 200 and response.content_type == "text/html"
    assert text.count('class="layer"') == 4 and 'aria-current="true">media<' in text


async def test_while_unloaded_there_is_nothing_to_tell(run: Any, demo_artifact: Path) -> None:
    config = Config(threads=1, keep_alive=0.01, expert_budget=20 * EXPERT_BYTES)
    daemon = await run(load_service(demo_artifact, config), None)
    asked = 0
    for _ in range(2):  # what was counted stays
        await daemon.chat("set the driver side to 21 degrees", max_tokens=3)
        await daemon.until(lambda load: not load.loaded)
        report = await experts(daemon)
        assert not report["loaded"] and "by_layer" not in report
        (entry,) = report["by_class"]
        assert entry["class"] is None and entry["hits"] + entry["misses"] > asked
        asked = entry["hits"] + entry["misses"]


async def test_it_needs_the_key(run: Any, demo_artifact: Path) -> None:
    daemon = await run(load_service(demo_artifact, Config(threads=1, api_key="secret")), None)
    await experts(daemon, status=401)


@pytest.mark.parametrize(
    ("authorization", "status"),
    [
        ("Bearer secret", 200),
        ("Basic " + base64.b64encode(b"anyone:secret").decode(), 200),
        ("Basic " + base64.b64encode(b":secret").decode(), 200),
        ("Basic " + base64.b64encode(b"secret").decode(), 401),
        ("Basic " + base64.b64encode(b"secret:other").decode(), 401),
        ("Basic secret", 401),
        ("Basic \u00e9", 401),
        ("Bearer \u00e9", 401),
        ("Bearer", 401),
        ("secret", 401),
        ("", 401),
    ],
)
async def test_browsers_give_the_key_as_a_password(
    run: Any, demo_artifact: Path, authorization: str, status: int
) -> None:
    daemon = await run(load_service(demo_artifact, Config(threads=1, api_key="secret")), None)
    headers = {"Authorization": authorization}
    for path, asked in (("experts", "Bearer"), ("experts.html", 'Basic realm="emberd"')):
        async with daemon.http.get(f"{daemon.url}/v1/{path}", headers=headers) as response:
            assert response.status == status
            assert response.headers.get("WWW-Authenticate") == (None if status == 200 else asked)
