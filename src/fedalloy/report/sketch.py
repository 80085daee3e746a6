"""A small picture as SVG, without scripts and without matplotlib: lines over rounds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from fedalloy.core.showing import tinted

WIDTH, HEIGHT = 460, 180
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 8, 8, 24
_MOST = 400
"""Points of a line that are drawn."""
Line = tuple[str, str, Sequence[tuple[float, float]]]
"""A colour, a dash pattern, and points."""


def lines_svg(lines: Sequence[Line], said: str, across: str = "round") -> str:
    """Lines in one frame, with the lowest and the highest value at its sides; empty without a finite point. ``said``
    tells those who cannot see it what it shows."""
    finite = [(colour, dash, [p for p in points if all(map(math.isfinite, p))]) for colour, dash, points in lines]
    every = [point for _, _, points in finite for point in points]
    if not every:
        return ""
    low_x, high_x = min(x for x, _ in every), max(x for x, _ in every)
    low_y, high_y = min(y for _, y in every), max(y for _, y in every)
    drawn = [
        f'<polyline fill="none" style="{tinted(colour)}" stroke-width="1.6" stroke-dasharray="{dash}" points="'
        + " ".join(f"{_x(x, low_x, high_x):.1f},{_y(y, low_y, high_y):.1f}" for x, y in _thinned(points))
        + '"/>'
        for colour, dash, points in finite
        if points
    ]
    return _frame(said, drawn, (low_y, high_y), (f"{low_x:g}", escape(across), f"{high_x:g}"))


def legend(colours: Mapping[str, str]) -> str:
    """The names of lines, each beside its colour."""
    marks = (
        f'<span style="{tinted(colour, "color")}">&#9632;</span> {escape(name)}' for name, colour in colours.items()
    )
    return f"<div>{' &nbsp; '.join(marks)}</div>"


def _frame(said: str, drawn: Sequence[str], y: tuple[float, float], x: tuple[str, str, str]) -> str:
    low, high, right = HEIGHT - _BOTTOM, _TOP, WIDTH - _RIGHT
    text = 'font-size="11" fill="currentColor" opacity="0.75"'
    return "".join([
        f'<svg role="img" aria-label="{escape(said)}" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'style="display:block;max-width:100%;height:auto">',
        f'<path d="M{_LEFT} {high}V{low}H{right}" fill="none" stroke="currentColor" opacity="0.4"/>', *drawn,
        f'<text x="{_LEFT - 4}" y="{high + 8}" text-anchor="end" {text}>{y[1]:.4g}</text>',
        f'<text x="{_LEFT - 4}" y="{low}" text-anchor="end" {text}>{y[0]:.4g}</text>',
        f'<text x="{_LEFT}" y="{HEIGHT - 8}" {text}>{x[0]}</text>',
        f'<text x="{(_LEFT + right) // 2}" y="{HEIGHT - 8}" text-anchor="middle" {text}>{x[1]}</text>',
        f'<text x="{right}" y="{HEIGHT - 8}" text-anchor="end" {text}>{x[2]}</text></svg>',
    ])  # fmt: skip


def _x(value: float, low: float, high: float) -> float:
    return _LEFT + (value - low) / ((high - low) or 1.0) * (WIDTH - _LEFT - _RIGHT)


def _y(value: float, low: float, high: float) -> float:
    return HEIGHT - _BOTTOM - (value - low) / ((high - low) or 1.0) * (HEIGHT - _TOP - _BOTTOM)


def _thinned(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    step = math.ceil(len(points) / _MOST)
    return points if step <= 1 else [*points[:-1:step], points[-1]]
