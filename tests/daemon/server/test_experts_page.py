"""The page shows what the JSON says."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import pytest
from emberd.daemon.server.experts_page import page

SVG = "{http://www.w3.org/2000/svg}"


def report(**changes: Any) -> dict[str, Any]:
    """Of two layers of four experts, some of them in memory."""
    layers = [
        {
            "layer": layer,
            "resident": [0, 3],
            "chosen": [0, 5, 10, 0],
            "hits": 3 * layer,
            "misses": layer,
            "expected": [0.25, 0.5, 0.25, 0.0],
        }
        for layer in range(2)
    ]
    return {
        "model": "a <model>",
        "loaded": True,
        "class": "r&d",
        "classes": [{"name": "r&d", "prior": 0.5}, {"name": "media", "prior": 0.5}],
        "layers": 2,
        "experts": 4,
        "budget_bytes": 4_000_000,
        "resident": 4,
        "hit_rate": 0.75,
        "by_layer": layers,
    } | changes


def parsed(text: str) -> ElementTree.Element:
    return ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>"))


def test_every_expert_has_its_heat() -> None:
    root = parsed(page(report()))
    cells = list(root.iter(f"{SVG}rect"))
    assert len(cells) == 2 * 2 * 4
    chosen = [cell.attrib["fill"] for cell in cells[:4]]
    assert chosen[0] == chosen[3] == "rgb(255,255,255)"
    assert chosen[2] == "rgb(178,24,43)" and chosen[1] not in chosen[2:]
    titles = [title.text for title in root.iter(f"{SVG}title")]
    assert titles[2] == "expert 2: chosen 10" and titles[5] == "expert 1: expected 0.5"
    assert [path.attrib["d"].count("M") for path in root.iter(f"{SVG}path")] == [2, 2]


def test_the_text_says_what_is_in_memory_and_how_well_that_does() -> None:
    text = "".join(parsed(page(report())).itertext())
    assert "Experts of a <model>" in text
    assert "4 of 8 in memory (budget 4.0 MB); 75.0% of what steps asked for was there" in text
    assert "of class r&d" in text and "hits 75.0%" in text
    mapped = page(report(budget_bytes=None, hit_rate=None))
    assert "(all are mapped)." in "".join(parsed(mapped).itertext())


def test_classes_are_links() -> None:
    root = parsed(page(report()))
    links = {link.text: link.attrib["href"] for link in root.iter("a")}
    assert links == {
        "any command": "experts.html",
        "r&d": "experts.html?class=r%26d",
        "media": "experts.html?class=media",
    }


@pytest.mark.parametrize("chosen", [[0, 0, 0, 0], [7, 0, 0, 0]])
def test_without_a_map_there_is_a_line_a_layer(chosen: list[int]) -> None:
    layers = [{**layer, "chosen": chosen, "resident": []} for layer in report()["by_layer"]]
    root = parsed(page(report(classes=[], by_layer=layers, **{"class": None})))
    assert len(list(root.iter(f"{SVG}rect"))) == 8
    assert not list(root.iter("a")) and not list(root.iter(f"{SVG}path"))


MINUTES = [
    {"start": 1_800_000_000, "hits": 1, "misses": 3},
    {"start": 1_800_000_120, "hits": 3, "misses": 1},
    {"start": 1_800_000_180, "hits": 4, "misses": 0},
]
BY_CLASS = [
    {
        "class": "r&d and others",
        "hits": 6,
        "misses": 4,
        "layers": [{"hits": 0, "misses": 4}, {"hits": 6, "misses": 0}],
    },
    {"class": "media", "hits": 0, "misses": 0, "layers": []},
    {
        "class": None,
        "hits": 2,
        "misses": 0,
        "layers": [{"hits": 0, "misses": 0}, {"hits": 2, "misses": 0}],
    },
]


def test_misses_are_drawn_by_class_and_layer() -> None:
    root = parsed(page(report(loaded=False, minutes=MINUTES, by_class=BY_CLASS)))
    labels = [text.text for text in root.iter(f"{SVG}text")]
    assert labels[:4] == ["r&d and ot", "hits 60.0%", "no class", "hits 100.0%"]
    cells = list(root.iter(f"{SVG}rect"))
    assert [cell[0].text for cell in cells[:2]] == [
        "layer 0: hits 0, misses 4",
        "layer 1: hits 6, misses 0",
    ]
    white = "rgb(255,255,255)"
    assert [cell.attrib["fill"] for cell in cells] == ["rgb(178,24,43)", white, white, white]


@pytest.mark.parametrize("loaded", [True, False])
def test_hit_rates_are_drawn_by_minute(loaded: bool) -> None:
    root = parsed(page(report(loaded=loaded, minutes=MINUTES, by_class=BY_CLASS)))
    (line,) = root.iter(f"{SVG}polyline")
    points = [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
    assert points == [(70, 69), (454, 29), (838, 9)]
    circles = list(root.iter(f"{SVG}circle"))
    assert [(float(c.attrib["cx"]), float(c.attrib["cy"])) for c in circles] == points
    assert circles[1][0].text == "2027-01-15 08:02 UTC: 75.0%"


def test_the_first_minute_is_a_point() -> None:
    root = parsed(page(report(minutes=MINUTES[:1], by_class=BY_CLASS)))
    assert len(list(root.iter(f"{SVG}circle"))) == 1


def test_before_any_minute_no_rates_are_drawn() -> None:
    root = parsed(page(report(minutes=[], by_class=BY_CLASS)))
    assert not list(root.iter(f"{SVG}polyline")) and "no class" not in "".join(root.itertext())


def test_an_unloaded_model_has_no_picture() -> None:
    root = parsed(page({"model": "m", "loaded": False, "class": None, "classes": []}))
    assert "not in memory" in "".join(root.itertext()) and not list(root.iter(f"{SVG}svg"))
