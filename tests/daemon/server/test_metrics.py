"""/metrics, read by a parser that takes nothing but the text format of Prometheus."""

from __future__ import annotations

import asyncio
import math
import re
from dataclasses import dataclass, field
from typing import Any

import pytest
from emberd.daemon.bindings import ExpertCounters
from emberd.daemon.metrics import Metrics

NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
LABELS = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\["\\n])*)"(?:,|$)')
SAMPLE = re.compile(rf"({NAME})(?:\{{(.*)\}})? (\S+)")
SUFFIXES = {"counter": ("",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}


@dataclass
class Family:
    """A metric: its samples by name and labels."""

    name: str
    help: str
    kind: str = ""
    samples: dict[tuple[str, tuple[tuple[str, str], ...]], float] = field(default_factory=dict)


def parse(text: str) -> dict[str, Family]:
    """The families of an exposition; AssertionError for whatever the format does not allow."""
    assert text.endswith("\n") and "\r" not in text
    families: dict[str, Family] = {}
    current = Family("", "")
    for line in text.removesuffix("\n").split("\n"):
        if match := re.fullmatch(rf"# HELP ({NAME}) (.+)", line):
            assert match[1] not in families
            current = families[match[1]] = Family(match[1], match[2])
        elif match := re.fullmatch(rf"# TYPE ({NAME}) (counter|gauge|histogram)", line):
            assert match[1] == current.name and not current.kind and not current.samples
            current.kind = match[2]
        else:
            match = SAMPLE.fullmatch(line)
            assert match, line
            assert match[1] in [current.name + s for s in SUFFIXES[current.kind]], line
            labels = LABELS.findall(match[2] or "")
            assert "".join(f'{k}="{v}",' for k, v in labels).rstrip(",") == (match[2] or "")
            key = (match[1], tuple(labels))
            assert key not in current.samples
            current.samples[key] = float(match[3])
    for family in families.values():
        _check(family)
    return families


def _check(family: Family) -> None:
    assert family.kind and family.help.endswith(".")
    values = family.samples.values()
    assert all(math.isfinite(value) for value in values)
    if family.kind == "counter":
        assert family.name.endswith("_total") and all(value >= 0 for value in values)
    elif family.kind == "gauge":
        assert not family.name.endswith(("_total", "_count", "_sum", "_bucket"))
    else:
        buckets = [(labels, v) for (name, labels), v in family.samples.items() if labels]
        bounds = [float(dict(labels)["le"]) for labels, _ in buckets]
        counts = [value for _, value in buckets]
        assert bounds == sorted(bounds) and bounds[-1] == math.inf
        assert counts == sorted(counts)
        assert counts[-1] == family.samples[f"{family.name}_count", ()]
        assert family.name.endswith("_seconds")


async def _metrics(daemon: Any) -> dict[str, float]:
    """Every sample by its name and labels' values."""
    async with daemon.http.get(daemon.url + "/metrics") as response:
        assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        families = parse(await response.text())
    return {
        " ".join([name, *(value for _, value in labels)]): value
        for family in families.values()
        for (name, labels), value in family.samples.items()
    }


@pytest.mark.usefixtures("every_boundary")
async def test_what_requests_did_is_counted(serve: Any) -> None:
    daemon = await serve(slots=3, context=128, max_queue=7)
    before = await _metrics(daemon)
    assert before["emberd_requests_total completed"] == 0
    first = (await daemon.chat("one", max_tokens=6, **daemon.endless))["usage"]
    second = (await daemon.chat("one", max_tokens=6, n=2, **daemon.endless))["usage"]
    await daemon.refusal({"messages": [{"role": "user", "content": "x"}], "max_tokens": 1000})
    values = await _metrics(daemon)
    assert values["emberd_http_responses_total 200"] == 3
    assert values["emberd_http_responses_total 400"] == 1
    assert values["emberd_requests_total completed"] == 2
    assert values["emberd_requests_total refused"] == 1
    assert values["emberd_prompt_tokens_total"] == 2 * first["prompt_tokens"]
    cached = second["prompt_tokens_details"]["cached_tokens"]
    assert values["emberd_cached_tokens_total"] == cached > 0
    assert values["emberd_generated_tokens_total"] == 18
    assert values["emberd_time_to_first_token_seconds_count"] == 2
    assert values["emberd_time_per_token_seconds_count"] == 15
    assert values["emberd_prefill_seconds_total"] > 0 < values["emberd_decode_seconds_total"]
    assert values["emberd_slots"] == 3 and values["emberd_queue_limit"] == 7
    assert values["emberd_slot_tokens"] >= first["prompt_tokens"] + 5
    assert values["process_resident_memory_bytes"] > 1 << 20
    assert values["process_open_fds"] > 3


def test_experts_are_counted_by_layer_and_by_class() -> None:
    layers = [
        ExpertCounters(hits=3, misses=1, bytes=50),
        ExpertCounters(stall_nanoseconds=2 * 10**9, expected=5, expected_used=4),
    ]
    named = [('a "b\\c', ExpertCounters(hits=2, misses=4)), (None, ExpertCounters(bytes=7))]
    families = parse(Metrics().text({}, layers, named))
    assert families["emberd_expert_hits_total"].samples == {
        ("emberd_expert_hits_total", (("layer", "0"),)): 3,
        ("emberd_expert_hits_total", (("layer", "1"),)): 0,
    }
    assert families["emberd_expert_class_misses_total"].samples == {
        ("emberd_expert_class_misses_total", (("class", 'a \\"b\\\\c'),)): 4,
        ("emberd_expert_class_misses_total", (("class", ""),)): 0,
    }
    stalls = families["emberd_expert_stall_seconds_total"].samples.values()
    assert list(stalls) == [0, 2]
    for name, count in (("layer_ahead", 5), ("layer_ahead_used", 4)):
        assert list(families[f"emberd_expert_{name}_total"].samples.values()) == [0, count]
    assert list(families["emberd_expert_class_read_bytes_total"].samples.values()) == [0, 7]


async def test_how_busy_the_daemon_is(start: Any, tokenizer: Any) -> None:
    (poison,) = tokenizer.encode("~")
    daemon = await start("hello", slots=1, poison=poison)
    daemon.model.gate.clear()
    tasks = [asyncio.create_task(daemon.chat()) for _ in range(3)]
    await daemon.until(lambda load: load.busy == 1 and load.queued == 2)
    values = await _metrics(daemon)
    assert (values["emberd_slots_busy"], values["emberd_queue_length"]) == (1, 2)
    tasks.pop().cancel()
    await daemon.until(lambda load: load.queued == 1)
    daemon.model.gate.set()
    await asyncio.gather(*tasks)
    await daemon.refusal({"messages": [{"role": "user", "content": "~"}]})
    values = await _metrics(daemon)
    assert (values["emberd_slots_busy"], values["emberd_queue_length"]) == (0, 0)
    outcomes = {name: values[f"emberd_requests_total {name}"] for name in ("cancelled", "failed")}
    assert outcomes == {"cancelled": 1, "failed": 1}
