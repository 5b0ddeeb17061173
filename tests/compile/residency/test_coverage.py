"""What a class's hot experts cover, as the map counted it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from activation_maps import random_map
from emberd.compile.residency.coverage import coverage, coverage_table


def test_coverage_is_the_share_of_a_quarter_of_the_experts() -> None:
    found = random_map(layers=2, experts=9)  # a quarter: three
    for index, entry in enumerate(found.classes):
        rows = entry.choices[:9], entry.choices[9:]
        hot = sum(sum(sorted(row)[-3:]) for row in rows)
        assert coverage(found, index) == pytest.approx(hot / sum(entry.choices))
    assert coverage(replace(found, classes=found.classes[:1]), None) == coverage(found, 0)


def test_a_line_a_class() -> None:
    found = random_map()
    first, second, *others = coverage_table(found).splitlines()
    assert first.startswith("choices that the most chosen quarter")
    assert second.split() == ["navigation", f"{coverage(found, 0):.1%}"]
    assert [line.split()[0] for line in others] == ["climate", "any"]
