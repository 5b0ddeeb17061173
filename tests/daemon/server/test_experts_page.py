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
            "chosen": [0, 5, 11, 0],
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
        "experts_per_token": 1,
        "expert_bytes": 2_000_000,
        "token_demand_bytes": 4_000_000,
        "budget_bytes": 8_000_000,
        "policy": "map-warmed",
        "resident": 4,
        "hit_rate": 0.75,
        "by_layer": layers,
    } | changes


def parsed(text: str) -> ElementTree.Element:
    return ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>"))


def shown(root: ElementTree.Element) -> str:
    """The text of the page, blanks as in a browser."""
    return " ".join("".join(root.itertext()).split())


def of(root: ElementTree.Element, kind: str) -> list[ElementTree.Element]:
    """The elements of a class."""
    return [element for element in root.iter() if element.get("class") == kind]


def rows(root: ElementTree.Element) -> list[list[tuple[str | None, str]]]:
    """Of each layer's picture the class of every path, and where it is."""
    pictures = [layer.find(f"{SVG}svg") for layer in of(root, "layer")]
    return [
        [(path.get("class"), path.attrib["d"]) for path in picture]
        for picture in pictures
        if picture is not None
    ]


def test_every_expert_has_its_heat() -> None:
    chosen = [("h3", "M1 6h1"), ("h4", "M2 6h1")]  # 5 and 11 of 16: 1.25 and 2.75 even shares
    expected = [("h2", "M0 20.5h1M2 20.5h1"), ("h3", "M1 20.5h1")]
    there = [("there", "M0 14h1M3 14h1")]
    assert rows(parsed(page(report()))) == 2 * [chosen + there + expected]


@pytest.mark.parametrize(
    ("share", "shade"), [(0.5, "h1"), (0.6, "h2"), (1, "h2"), (2, "h3"), (8, "h5"), (8.5, "h6")]
)
def test_shades_tell_how_many_even_shares_an_expert_has(share: float, shade: str) -> None:
    chosen = [share * 15, *([16 - share] * 15)]
    layer = {**report()["by_layer"][0], "chosen": chosen, "resident": []}
    root = parsed(page(report(classes=[], experts=16, by_layer=[layer])))
    paths = {d: name for name, d in rows(root)[0]}
    assert next(name for d, name in paths.items() if d.startswith("M0 ")) == shade


def test_neighbours_of_a_shade_are_one_line() -> None:
    layer = {**report()["by_layer"][0], "chosen": [4, 4, 4, 4], "resident": [1, 2, 3]}
    root = parsed(page(report(classes=[], by_layer=[layer])))
    assert rows(root) == [[("h2", "M0 9h4"), ("there", "M1 21h3")]]


def test_hottest_experts_are_named_with_their_shares() -> None:
    assert [cell.text for cell in of(parsed(page(report())), "hot")] == [
        "hottest experts",
        "2 (69%), 1 (31%)",
        "2 (69%), 1 (31%)",
    ]


def test_experts_and_hit_rates_have_axes() -> None:
    root = parsed(page(report(minutes=MINUTES, by_class=BY_CLASS)))
    (ticks,), (scale,) = of(root, "ticks"), of(root, "scale")
    assert [tick.text for tick in ticks] == ["0", "1", "2", "3"]
    assert [level.text for level in scale] == ["100 %", "50 %", "0"]


def test_the_text_says_what_is_in_memory_and_how_well_that_does() -> None:
    root = parsed(page(report()))
    text = shown(root)
    facts = {fact[0].text: fact[1].text for fact in root.iter("div") if fact.find("dt") is not None}
    assert "Experts of a <model>" in text
    assert facts == {
        "in memory": "4 of 8 experts",
        "budget": "8 MB of 16 MB",
        "a token needs": "2 experts, 4 MB",
        "hit rate since loading": "75.0%",
        "policy": "map-warmed",
    }
    assert [cell.text for cell in of(root, "rate")] == ["hit rate", None, "75.0%"]


def test_before_any_step_there_is_no_rate() -> None:
    assert "nothing asked for yet" in shown(parsed(page(report(hit_rate=None))))


def test_without_a_budget_all_are_mapped() -> None:
    root = parsed(page(report(budget_bytes=None, hit_rate=None)))
    assert "none: all are mapped" in shown(root)
    assert not of(root, "there") and "in memory now" not in shown(root)


@pytest.mark.parametrize(
    ("count", "text"),
    [(512, "512 bytes"), (24576, "24.6 kB"), (999_999, "1 MB"), (2_345_678_000_000, "2,346 GB")],
)
def test_sizes_are_short(count: int, text: str) -> None:
    assert f"2 experts, {text}" in shown(parsed(page(report(token_demand_bytes=count))))


def test_classes_are_links() -> None:
    root = parsed(page(report()))
    links = {link.text: link.attrib["href"] for link in root.iter("a")}
    assert links == {
        "any command": "experts.html",
        "r&d": "experts.html?class=r%26d",
        "media": "experts.html?class=media",
    }
    assert [link.text for link in root.iter("a") if link.get("aria-current")] == ["r&d"]


@pytest.mark.parametrize("chosen", [[0, 0, 0, 0], [7, 0, 0, 0]])
def test_without_a_map_there_is_a_row_a_layer(chosen: list[int]) -> None:
    layers = [{**layer, "chosen": chosen, "resident": []} for layer in report()["by_layer"]]
    root = parsed(page(report(classes=[], by_layer=layers, **{"class": None})))
    assert rows(root) == 2 * [[("h4", "M0 9h1")] if any(chosen) else []]
    assert not list(root.iter("a")) and "activation map" not in shown(root)


def test_nothing_is_loaded_from_elsewhere() -> None:
    """Nor run: a device may be without a net, and the page needs no script."""
    root = parsed(page(report(minutes=MINUTES, by_class=BY_CLASS)))
    assert [link.get("href") for link in root.iter("link")] == ["data:,"]
    assert not any(element.get("src") for element in root.iter())
    assert not list(root.iter("script")) and "url(" not in page(report())


MINUTES = [
    {"start": 1_800_000_000, "hits": 1, "misses": 3},
    {"start": 1_800_000_120, "hits": 3, "misses": 1},
    {"start": 1_800_000_180, "hits": 4, "misses": 0},
]


def costs(hits: int, misses: int, **more: Any) -> dict[str, Any]:
    counted = {"hits": hits, "misses": misses}
    counted |= dict.fromkeys(("skipped", "substituted", "layer_ahead", "layer_ahead_used"), 0)
    return {**counted, "read_bytes": 2_000_000 * misses, "stall_seconds": misses / 8, **more}


BY_CLASS = [
    costs(6, 4, layers=[costs(0, 4), costs(6, 0)], **{"class": "r&d and others"}),
    costs(0, 0, layers=[], **{"class": "media"}),
    costs(1200, 0, layers=[costs(0, 0), costs(1200, 0)], **{"class": None}),
]


def table(root: ElementTree.Element) -> list[list[str | None]]:
    return [[cell.text for cell in row] for row in root.iter("tr")]


@pytest.mark.parametrize("loaded", [True, False])
def test_costs_are_told_by_class(loaded: bool) -> None:
    root = parsed(page(report(loaded=loaded, by_class=BY_CLASS)))
    assert table(root) == [
        ["class", "hit rate", "asked for", "read", "waited", "hit rate, first to last layer"],
        ["r&d and others", "60.0%", "10", "8 MB", "0.50 s", None],
        ["no class", "100.0%", "1,200", "0 bytes", "0.00 s", None],
    ]
    bars = [bar for cell in of(root, "strip") for bar in cell.iter(f"{SVG}rect")]
    assert [bar[0].text for bar in bars] == ["layer 0: 0.0%", "layer 1: 100.0%", "layer 1: 100.0%"]
    assert [bar.get("height") for bar in bars] == ["0.0", "100.0", "100.0"]


@pytest.mark.parametrize("name", ["skipped", "substituted", "layer_ahead", "layer_ahead_used"])
def test_what_is_rare_is_told_where_it_happened(name: str) -> None:
    taken = costs(6, 4, layers=[costs(6, 4)], **{"class": "media", name: 3})
    heads, row = table(parsed(page(report(by_class=[taken]))))
    assert heads[5] == name.replace("_", " ") and row[5] == "3" and len(heads) == 7


def test_without_a_map_there_are_no_classes_to_tell_apart() -> None:
    root = parsed(page(report(classes=[], by_class=BY_CLASS[2:])))
    assert table(root)[1][0] == "all commands"


@pytest.mark.parametrize("loaded", [True, False])
def test_hit_rates_are_drawn_by_minute(loaded: bool) -> None:
    root = parsed(page(report(loaded=loaded, minutes=MINUTES)))
    (plot,), (times,) = of(root, "plot"), of(root, "times")
    bars = list(plot.iter(f"{SVG}rect"))
    assert [float(bar.attrib["x"]) for bar in bars] == [56.1, 58.1, 59.1]  # a gap, then neighbours
    assert [float(bar.attrib["height"]) for bar in bars] == [25, 75, 100]
    assert [float(bar.attrib["y"]) for bar in bars] == [75, 25, 0]
    assert bars[1][0].text == "2027-01-15 08:02: 75.0% of 4"
    assert [label.text for label in times] == ["2027-01-15 08:03"]


def test_many_minutes_are_labelled_at_both_ends() -> None:
    minutes = [{**MINUTES[0], "start": 1_800_000_000 + 120 * n} for n in range(60)]
    root = parsed(page(report(minutes=minutes)))
    (plot,), (times,) = of(root, "plot"), of(root, "times")
    assert [float(bar.attrib["x"]) for bar in plot.iter(f"{SVG}rect")][::59] == [0.1, 118.1]
    assert [(label.text, label.get("style")) for label in times] == [
        ("2027-01-15 08:00", "left:0.0%"),
        ("2027-01-15 09:58", "right:0"),
    ]


def test_before_any_minute_no_rates_are_drawn() -> None:
    root = parsed(page(report(minutes=[], by_class=BY_CLASS[1:2])))
    assert not of(root, "plot") and not list(root.iter("table"))


def test_an_unloaded_model_has_no_picture() -> None:
    root = parsed(page({"model": "m", "loaded": False, "class": None, "classes": []}))
    assert "not in memory" in shown(root) and not list(root.iter(f"{SVG}svg"))
