"""From an artifact's text files to a service: templates, defaults, and files that make no sense."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from emberd.daemon.config import Config
from emberd.daemon.errors import EmberdError
from emberd.daemon.server.service import load_service, sampling_defaults

Change = Callable[[str, bytes | None], None]
PLAIN = "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}"


@pytest.fixture
def artifact(demo_artifact: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(demo_artifact, tmp_path / "artifact"))


@pytest.fixture
def change(artifact: Path) -> Change:
    """Replaces a file of the artifact, or takes it out, as if the artifact had been built so."""

    def replace(name: str, data: bytes | None) -> None:
        manifest = json.loads((artifact / "manifest.json").read_text())
        (artifact / name).unlink()
        del manifest["files"][name]
        if data is not None:
            (artifact / name).write_bytes(data)
            digest = hashlib.blake2b(data, digest_size=32).hexdigest()
            manifest["files"][name] = {"bytes": len(data), "blake2b": digest}
        (artifact / "manifest.json").write_text(json.dumps(manifest))

    return replace


def _config(template: Any) -> bytes:
    return json.dumps({"chat_template": template}).encode()


async def _served(run: Any, artifact: Path) -> Any:
    return await run(load_service(artifact, Config(threads=1)), None)


@pytest.mark.parametrize(
    "template",
    [
        PLAIN,
        [{"name": "tool_use", "template": "{{ x.y }}"}, {"name": "default", "template": PLAIN}],
    ],
)
async def test_templates_in_the_tokenizer_configuration(
    artifact: Path, change: Change, run: Any, template: Any
) -> None:
    change("chat_template.jinja", None)
    change("tokenizer_config.json", _config(template))
    daemon = await _served(run, artifact)
    assert (await daemon.chat("#", max_tokens=1))["usage"]["prompt_tokens"] == 2


@pytest.mark.parametrize("configuration", [None, _config(None), _config([]), _config(3)])
async def test_a_model_without_a_template_completes_text(
    artifact: Path, change: Change, run: Any, configuration: bytes | None
) -> None:
    change("chat_template.jinja", None)
    change("tokenizer_config.json", configuration)
    daemon = await _served(run, artifact)
    status, error = await daemon.refusal({"messages": [{"role": "user", "content": "x"}]})
    assert (status, error["code"]) == (400, "no_chat_template")
    async with daemon.post("/v1/completions", {"prompt": "x", "max_tokens": 1}) as response:
        assert response.status == 200


async def test_a_template_of_nothing_is_refused(artifact: Path, change: Change, run: Any) -> None:
    change("chat_template.jinja", b"")
    daemon = await _served(run, artifact)
    status, error = await daemon.refusal({"messages": [{"role": "user", "content": "x"}]})
    assert status == 400 and "empty prompt" in error["message"]


async def test_sampling_defaults_are_the_checkpoint_s(
    artifact: Path, change: Change, run: Any
) -> None:
    change("generation_config.json", b'{"temperature": 2.0, "top_k": 1, "do_sample": true}')
    daemon = await _served(run, artifact)
    fields = {"temperature": None, "max_tokens": 60, "ignore_eos": True}
    greedy = await daemon.chat(**(fields | {"temperature": 0}))
    assert (await daemon.chat(seed=2, **fields))["choices"] == greedy["choices"]
    sampled = await daemon.chat(seed=3, top_k=0, **fields, logprobs=True, top_logprobs=1)
    entries = sampled["choices"][0]["logprobs"]["content"]
    assert any(entry["token"] != entry["top_logprobs"][0]["token"] for entry in entries)


def test_no_sampling_means_greedy() -> None:
    assert sampling_defaults({"do_sample": False, "temperature": 0.7}) == {"temperature": 0.0}
    assert sampling_defaults({"top_k": None, "min_p": 0.1}) == {"min_p": 0.1}
    off = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    assert sampling_defaults(off) == {"temperature": 1.0, "top_k": 0, "top_p": 1.0}


@pytest.mark.parametrize(
    "setting",
    [
        {"temperature": -5},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"temperature": True},
        {"top_k": 1.5},
        {"top_k": "many"},
        {"top_k": -2},
        {"top_p": 44},
        {"min_p": False},
        {"do_sample": 0},
    ],
    ids=str,
)
def test_defaults_that_no_request_may_have(setting: dict[str, Any]) -> None:
    (name,) = setting
    with pytest.raises(EmberdError, match=f"^generation_config.json: {name}: expected "):
        sampling_defaults(setting)


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("tokenizer_config.json", b"{", "not JSON"),
        ("tokenizer_config.json", b"[]", "expected an object"),
        ("generation_config.json", b"\xff", "not UTF-8"),
        ("chat_template.jinja", b"{% for %}", "chat template: "),
        ("chat_template.jinja", b"\xff", "not UTF-8"),
        ("vocabulary.msgpack", b"{}", "vocabulary.msgpack is not readable"),
        ("vocabulary.msgpack", None, "its model had no tokenizer.json"),
    ],
)
def test_files_that_make_no_sense(
    artifact: Path, change: Change, name: str, data: bytes | None, reason: str
) -> None:
    change(name, data)
    with pytest.raises(EmberdError, match=reason):
        load_service(artifact, Config(threads=1))
