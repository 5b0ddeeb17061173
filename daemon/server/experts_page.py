"""The answer of GET /v1/experts as a picture: the heat of every expert, layer by layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Any
from urllib.parse import quote

_REFRESH_SECONDS = 2
_LEFT, _WIDTH, _RIGHT = 70, 768, 170
_LABEL = 10  # characters that fit at the left
_HOTTEST = (178, 24, 43)
_BAND = 9  # height of a row of experts
_CURVE = 80  # height of the curve of hit rates


def page(report: dict[str, Any]) -> str:
    """An HTML page, well-formed as XML, for the JSON object `report`."""
    name = escape(report["model"])
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8"/>',
            f'<meta http-equiv="refresh" content="{_REFRESH_SECONDS}"/>',
            f"<title>Experts of {name}</title>",
            "<style>body{font:14px sans-serif;margin:2em}a{margin-right:1em}svg{margin-top:1em}"
            "</style></head><body>",
            f"<h1>Experts of {name}</h1>",
            *(_loaded(report) if report["loaded"] else ["<p>The model is not in memory.</p>"]),
            *(_hit_rates(report) if report.get("minutes") else []),
            "</body></html>",
            "",
        ]
    )


def _loaded(report: dict[str, Any]) -> Iterator[str]:
    total = report["layers"] * report["experts"]
    budget = report["budget_bytes"]
    kept = "all are mapped" if budget is None else f"budget {budget / 1e6:.1f} MB"
    rate = report["hit_rate"]
    hits = "" if rate is None else f"; {rate:.1%} of what steps asked for was there"
    yield f"<p>{report['resident']} of {total} in memory ({kept}){hits}.</p>"
    yield (
        "<p>Of each layer, first line: what tokens chose since the model was loaded, the darker "
        "the more; underlined: in memory."
    )
    if report["classes"]:
        yield f" Second line: what the activation map expects of {_chosen_class(report)}."
        yield "</p><p>"
        for name in (None, *(entry["name"] for entry in report["classes"])):
            yield _link(name)
    yield "</p>"
    yield from _picture(report)


def _chosen_class(report: dict[str, Any]) -> str:
    return "any command" if report["class"] is None else f"class {escape(report['class'])}"


def _link(name: str | None) -> str:
    query = "" if name is None else f"?class={quote(name)}"
    return f'<a href="experts.html{query}">{escape(name or "any command")}</a>'


def _picture(report: dict[str, Any]) -> Iterator[str]:
    mapped = bool(report["classes"])
    row = (_BAND + 3) * (1 + mapped) + 6
    height = row * report["layers"]
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + _RIGHT}" '
        f'height="{height}" font-size="11">'
    )
    for number, layer in enumerate(report["by_layer"]):
        top = row * number
        hits = f"hits {_share(layer):.1%}" if _asked(layer) else ""
        yield f'<text x="0" y="{top + _BAND}">layer {layer["layer"]}</text>'
        yield f'<text x="{_LEFT + _WIDTH + 8}" y="{top + _BAND}">{hits}</text>'
        yield from _cells(layer["chosen"], top, "chosen")
        yield from _underlined(layer["resident"], report["experts"], top + _BAND)
        if mapped:
            yield from _cells(layer["expected"], top + _BAND + 3, "expected")
    yield "</svg>"


def _cells(values: Sequence[float], top: int, kind: str) -> Iterator[str]:
    width, most = _WIDTH / len(values), max(values) or 1
    for expert, value in enumerate(values):
        text = f"expert {expert}: {kind} {value}"
        yield _cell(_LEFT + expert * width, top, width, value / most, text)


def _cell(left: float, top: int, width: float, heat: float, text: str) -> str:
    """`heat`: 0 to 1; `text`: shown where a pointer rests on it."""
    return (
        f'<rect x="{left:.2f}" y="{top}" width="{width:.2f}" height="{_BAND}" '
        f'fill="{_colour(heat)}"><title>{text}</title></rect>'
    )


def _underlined(experts: Sequence[int], count: int, top: int) -> Iterator[str]:
    width = _WIDTH / count
    lines = "".join(f"M{_LEFT + expert * width:.2f} {top + 1}h{width:.2f}" for expert in experts)
    if lines:
        yield f'<path d="{lines}" stroke="#2166ac" stroke-width="2"/>'


def _hit_rates(report: dict[str, Any]) -> Iterator[str]:
    """Of each class layer by layer, and a curve of all from minute to minute."""
    yield (
        "<p>By class of command, since the daemon was started: what share of what steps asked for "
        "was not in memory, from the first layer (left) to the last, the darker the more.</p>"
    )
    yield from _by_class([entry for entry in report["by_class"] if _asked(entry)])
    minutes = report["minutes"]
    yield f"<p>In the last {len(minutes)} minutes in which experts were asked for:</p>"
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + _RIGHT}" '
        f'height="{_CURVE + 2 * _BAND}" font-size="11">'
    )
    for percent, level in ((100, _BAND), (0, _BAND + _CURVE)):
        yield f'<text x="0" y="{level + 4}">{percent} %</text>'
        yield f'<path d="M{_LEFT} {level}h{_WIDTH}" stroke="#ccc"/>'
    step = _WIDTH / max(len(minutes) - 1, 1)
    points = [
        (f"{_LEFT + step * number:.1f}", f"{_BAND + _CURVE * (1 - _share(minute)):.1f}", minute)
        for number, minute in enumerate(minutes)
    ]
    line = " ".join(f"{x},{y}" for x, y, _ in points)
    yield f'<polyline points="{line}" fill="none" stroke="#2166ac"/>'
    for x, y, minute in points:
        when = datetime.fromtimestamp(minute["start"], UTC)
        yield (
            f'<circle cx="{x}" cy="{y}" r="3" fill="#2166ac">'
            f"<title>{when:%Y-%m-%d %H:%M} UTC: {_share(minute):.1%}</title></circle>"
        )
    yield "</svg>"


def _by_class(entries: Sequence[dict[str, Any]]) -> Iterator[str]:
    row = _BAND + 6
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + _RIGHT}" '
        f'height="{row * len(entries)}" font-size="11">'
    )
    for number, entry in enumerate(entries):
        top, name = row * number, entry["class"] or "no class"
        label, rest = escape(name[:_LABEL]), f"<title>{escape(name)}</title>"
        yield f'<text x="0" y="{top + _BAND}">{label}{rest}</text>'
        yield f'<text x="{_LEFT + _WIDTH + 8}" y="{top + _BAND}">hits {_share(entry):.1%}</text>'
        yield f'<path d="M{_LEFT} {top + _BAND + 1}h{_WIDTH}" stroke="#ccc"/>'
        width = _WIDTH / len(entry["layers"])
        for layer, counted in enumerate(entry["layers"]):
            missed = 1 - _share(counted) if _asked(counted) else 0.0
            text = f"layer {layer}: hits {counted['hits']}, misses {counted['misses']}"
            yield _cell(_LEFT + layer * width, top, width, missed, text)
    yield "</svg>"


def _asked(counted: dict[str, Any]) -> int:
    """How many experts steps asked for."""
    return int(counted["hits"] + counted["misses"])


def _share(counted: dict[str, Any]) -> float:
    """Of what steps asked for, what was there."""
    return float(counted["hits"] / _asked(counted))


def _colour(heat: float) -> str:
    """From white at 0 to a dark red at 1."""
    channels = (round(255 + (end - 255) * heat) for end in _HOTTEST)
    return f"rgb({','.join(map(str, channels))})"
