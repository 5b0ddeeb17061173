"""The answer of GET /v1/experts for people: what experts cost, and which of them are hot.

One page of HTML and SVG, without scripts and without anything to load. Its pictures have a unit of
width for each expert, layer or minute and are stretched to the window, so they hold no text.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from html import escape
from itertools import groupby
from typing import Any
from urllib.parse import quote

from emberd.daemon.server.experts_style import STYLE

_RARE = ("substituted", "skipped", "layer_ahead", "layer_ahead_used")  # told where it happened
_REFRESH_SECONDS = 5
_HEATS = (0.5, 1, 2, 4, 8)  # bounds of the shades, in even shares
_SHADES = ("never", "to ½", "to 1", "to 2", "to 4", "to 8", "more")
_NAMED = 3  # of a layer's experts, the hottest ones
_MINUTES = 60  # that the picture has room for at least
_LABELLED = 20  # minutes between two labels that do not touch
_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def page(report: dict[str, Any]) -> str:
    """An HTML page, well-formed as XML, for the JSON object `report`."""
    name = escape(report["model"])
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8"/>',
            '<meta name="viewport" content="width=device-width"/>',
            f'<meta http-equiv="refresh" content="{_REFRESH_SECONDS}"/>',
            '<link rel="icon" href="data:,"/>',
            f"<title>Experts of {name}</title>",
            f"<style>{STYLE}</style></head><body>",
            f"<h1>Experts of {name}</h1>",
            *_summary(report),
            *(_minutes(report["minutes"]) if report.get("minutes") else []),
            *_classes(report),
            *(_layers(report) if report["loaded"] else []),
            "</body></html>",
            "",
        ]
    )


def _summary(report: dict[str, Any]) -> Iterator[str]:
    if not report["loaded"]:
        yield "<p>The model is not in memory; the next request loads it.</p>"
        return
    total, budget = report["layers"] * report["experts"], report["budget_bytes"]
    rate, demand = report["hit_rate"], report["layers"] * report["experts_per_token"]
    bank = _size(total * report["expert_bytes"])
    facts = {
        "in memory": f"{report['resident']:,} of {total:,} experts",
        "budget": "none: all are mapped" if budget is None else f"{_size(budget)} of {bank}",
        "a token needs": f"{demand} experts, {_size(report['token_demand_bytes'])}",
    }
    if budget is not None:
        facts["hit rate since loading"] = "nothing asked for yet" if rate is None else f"{rate:.1%}"
        facts["policy"] = escape(report["policy"])
    yield '<dl class="facts">'
    yield from (f"<div><dt>{name}</dt><dd>{fact}</dd></div>" for name, fact in facts.items())
    yield "</dl>"


def _minutes(minutes: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A bar for each, the latest at the right, and a gap wherever minutes were left out."""
    places, place = [], 0
    for number, minute in enumerate(minutes):
        place += 1 + (number > 0 and minute["start"] - minutes[number - 1]["start"] > 60)
        places.append(place)
    width = max(place, _MINUTES)
    yield "<h2>Hit rate by minute</h2>"
    yield (
        "<p>Of the experts that steps asked for, the share that was in memory. Minutes in which "
        "none were asked for are left out (a gap). Times are UTC.</p>"
    )
    yield '<div class="chart"><div class="scale"><span>100 %</span><span>50 %</span>'
    yield '<span>0</span></div><div class="plot">'
    yield _svg(width, 100)
    yield f'<path class="grid" d="M0 50h{width}"/>'
    for place, minute in zip(places, minutes, strict=True):
        left = place + width - places[-1] - 1
        yield _bar(left, minute, f"{_time(minute)}: {_share(minute):.1%} of {_asked(minute):,}")
    yield '</svg></div><div class="times">'
    if places[-1] - places[0] >= _LABELLED:
        first = 100 * (places[0] + width - places[-1] - 1) / width
        yield f'<span style="left:{first:.1f}%">{_time(minutes[0])}</span>'
    yield f'<span style="right:0">{_time(minutes[-1])}</span></div></div>'


def _classes(report: dict[str, Any]) -> Iterator[str]:
    """What commands of each class cost, and how that is spread over the layers."""
    entries = [entry for entry in report.get("by_class", ()) if _asked(entry)]
    if not entries:
        return
    rare = [name for name in _RARE if any(entry[name] for entry in entries)]
    named = (name.replace("_", " ") for name in rare)
    heads = ("class", "hit rate", "asked for", "read", "waited", *named)
    yield "<h2>Cost by class of command</h2>"
    yield "<p>Counts are of experts, since the daemon was started.</p>"
    yield '<div class="wide"><table><thead><tr>'
    yield from (f"<th>{head}</th>" for head in heads)
    yield "<th>hit rate, first to last layer</th></tr></thead><tbody>"
    for entry in entries:
        name = entry["class"] or ("no class" if report["classes"] else "all commands")
        figures = (
            f"{_share(entry):.1%}",
            f"{_asked(entry):,}",
            _size(entry["read_bytes"]),
            f"{entry['stall_seconds']:,.2f} s",
            *(f"{entry[name]:,}" for name in rare),
        )
        yield f"<tr><th>{escape(name)}</th>"
        yield from (f"<td>{figure}</td>" for figure in figures)
        yield f'<td class="strip">{_svg(len(entry["layers"]), 100)}'
        for layer, counted in enumerate(entry["layers"]):
            if _asked(counted):
                yield _bar(layer, counted, f"layer {layer}: {_share(counted):.1%}")
        yield "</svg></td></tr>"
    yield "</tbody></table></div>"


def _layers(report: dict[str, Any]) -> Iterator[str]:
    """Of each layer a row of all its experts, beside the names of its hottest ones."""
    mapped, budgeted, count = (
        bool(report["classes"]),
        report["budget_bytes"] is not None,
        report["experts"],
    )
    yield (
        "<h2>Heat by layer</h2><p>What tokens chose since the model was loaded. Shades tell how "
        "many times as often as if all experts were chosen equally often.</p>"
    )
    yield _legend(budgeted)
    if mapped:
        names = (None, *(entry["name"] for entry in report["classes"]))
        tabs = "".join(_tab(name, name == report["class"]) for name in names)
        yield f'<p class="tabs">Lower rows: what the activation map expects of {tabs}</p>'
    yield '<div class="layer heads"><span></span><span class="ticks">'
    yield from (f"<i>{count * quarter // 4}</i>" for quarter in range(4))
    yield '</span><span class="rate">hit rate</span><span class="hot">hottest experts</span></div>'
    for layer in report["by_layer"]:
        yield f'<div class="layer"><span>layer {layer["layer"]}</span>{_svg(count, 24)}'
        yield from _cells(layer["chosen"], 0, 12 if mapped else 18)
        if budgeted:
            there = set(layer["resident"])
            runs = _runs([expert in there for expert in range(count)], 14 if mapped else 21)
            if True in runs:
                yield f'<path class="there" d="{runs[True]}"/>'
        if mapped:
            yield from _cells(layer["expected"], 17, 7)
        rate = f"{_share(layer):.1%}" if _asked(layer) else ""
        yield f'</svg><span class="rate">{rate}</span>'
        yield f'<span class="hot">{_hottest(layer["chosen"])}</span></div>'


def _tab(name: str | None, chosen: bool) -> str:
    text = escape(name or "any command")
    query = "" if name is None else f"?class={quote(name)}"
    current = ' aria-current="true"' if chosen else ""
    return f'<a href="experts.html{query}"{current}>{text}</a>'


def _legend(budgeted: bool) -> str:
    keys = [f'<b class="h{shade}"></b>{name}' for shade, name in enumerate(_SHADES)]
    if budgeted:
        keys.append('<b class="there"></b>in memory now')
    return f'<p class="legend">{"".join(f"<span>{key}</span>" for key in keys)}</p>'


def _svg(width: int, height: int) -> str:
    """The start of a picture that fills the place it is given."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'preserveAspectRatio="none">'
    )


def _bar(left: int, counted: dict[str, Any], text: str) -> str:
    """A hit rate, in a picture 100 high; `text`: shown where a pointer rests on it."""
    high = 100 * _share(counted)
    return (
        f'<rect x="{left + 0.1:.1f}" y="{100 - high:.1f}" width="0.8" height="{high:.1f}">'
        f"<title>{text}</title></rect>"
    )


def _cells(values: Sequence[float], top: int, height: int) -> Iterator[str]:
    """A row of shares of a layer's choices, a path for each shade but the first, which is blank."""
    even = sum(values) / len(values) or 1
    shades = [1 + bisect_left(_HEATS, value / even) if value else 0 for value in values]
    for shade, runs in sorted(_runs(shades, top + height / 2).items()):
        if shade:
            yield f'<path class="h{shade}" stroke-width="{height}" d="{runs}"/>'


def _runs(values: Sequence[int], middle: float) -> dict[int, str]:
    """For each value the path over its places, neighbours as one."""
    runs: dict[int, str] = {}
    start = 0
    for value, group in groupby(values):
        length = len(list(group))
        runs[value] = f"{runs.get(value, '')}M{start} {middle:g}h{length}"
        start += length
    return runs


def _hottest(chosen: Sequence[int]) -> str:
    """The first few experts, each with its share of the layer's choices."""
    total = sum(chosen)
    order = sorted(range(len(chosen)), key=lambda expert: -chosen[expert])[:_NAMED]
    return ", ".join(
        f"{expert} ({chosen[expert] / total:.0%})" for expert in order if chosen[expert]
    )


def _asked(counted: dict[str, Any]) -> int:
    """How many experts steps asked for."""
    return int(counted["hits"] + counted["misses"])


def _share(counted: dict[str, Any]) -> float:
    """Of what steps asked for, what was there."""
    return float(counted["hits"] / _asked(counted))


def _time(minute: dict[str, Any]) -> str:
    return f"{datetime.fromtimestamp(minute['start'], UTC):%Y-%m-%d %H:%M}"


def _size(count: float) -> str:
    """Of bytes."""
    for unit, name in _UNITS:
        if count >= 0.9995 * unit:
            figure = count / unit
            return f"{figure:.3g} {name}" if figure < 999.5 else f"{figure:,.0f} {name}"
    return f"{count:.0f} bytes"
