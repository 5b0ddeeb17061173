"""Curves as SVG, without a library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

_WIDTH, _HEIGHT = 720, 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 190, 40, 50
# Okabe and Ito's colours, which people who are colour blind tell apart.
_COLOURS = (
    "#000000",
    "#e69f00",
    "#56b4e9",
    "#009e73",
    "#d55e00",
    "#0072b2",
    "#cc79a7",
    "#f0e442",
)


def curves(
    title: str, x_label: str, y_label: str, lines: Mapping[str, Sequence[tuple[float, float]]]
) -> str:
    """An SVG document of one curve a name; x and y from 0 to 1, shown in per cent."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        _text(_LEFT, 24, title, 'font-size="15"'),
    ]
    for tenth in range(0, 11, 2):
        x, y = _place(tenth / 10, tenth / 10)
        bottom, left = _place(0, 0)[1], _place(0, 0)[0]
        parts += [
            f'<path d="M{x:.1f} {_TOP}V{bottom}M{left} {y:.1f}H{_WIDTH - _RIGHT}" stroke="#ddd"/>',
            _text(x, bottom + 18, f"{tenth * 10}%", 'text-anchor="middle"'),
            _text(left - 8, y + 4, f"{tenth * 10}%", 'text-anchor="end"'),
        ]
    middle = _place(0.5, 0.5)
    parts += [
        _text(middle[0], _HEIGHT - 10, x_label, 'text-anchor="middle"'),
        _text(
            16,
            middle[1],
            y_label,
            f'text-anchor="middle" transform="rotate(-90 16 {middle[1]:.1f})"',
        ),
    ]
    for number, (name, points) in enumerate(lines.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        path = " ".join("{:.1f},{:.1f}".format(*_place(x, y)) for x, y in points)
        at = _TOP + 10 + 20 * number
        start = _WIDTH - _RIGHT + 12
        parts += [
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>',
            f'<path d="M{start} {at}h22" stroke="{colour}" stroke-width="2"/>',
            _text(start + 28, at + 4, name),
        ]
    return "\n".join([*parts, "</svg>", ""])


def _place(x: float, y: float) -> tuple[float, float]:
    width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
    return _LEFT + x * width, _TOP + (1 - y) * height


def _text(x: float, y: float, text: str, attributes: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {attributes}>{escape(text)}</text>'
