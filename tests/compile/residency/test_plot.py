"""The picture is well-formed and has every curve where its numbers are."""

from __future__ import annotations

from xml.etree import ElementTree

from emberd.compile.residency.plot import curves

SVG = "{http://www.w3.org/2000/svg}"


def test_every_curve_is_drawn_and_named() -> None:
    lines = {"lru": [(0.0, 0.0), (0.5, 0.25), (1.0, 1.0)], "a < b": [(0.0, 1.0)]}
    root = ElementTree.fromstring(curves("Hit rate", "budget", "hits", lines))
    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert {"Hit rate", "budget", "hits", "lru", "a < b"} <= set(texts)
    first, second = root.iter(f"{SVG}polyline")
    points = [tuple(map(float, point.split(","))) for point in first.attrib["points"].split()]
    (left, bottom), (middle, low), (right, top) = points
    assert left < middle < right and bottom > low > top
    assert middle - left == right - middle and bottom - low == (bottom - top) / 4
    assert second.attrib["points"] == f"{left:.1f},{top:.1f}"
