"""Line charts as inline SVG, drawn by hand: no script, no library, readable in light and dark."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

Line = Sequence[tuple[int, float]]
WIDTH, HEIGHT = 640, 260
LEFT, RIGHT, TOP, BOTTOM = 44, 12, 12, 28
COLOURS = 8


def line_chart(lines: Mapping[str, Line], label: str, target: float | None = None) -> str:
    """One line per name over rounds, with a legend; ``target`` is a dashed line."""
    points = [point for line in lines.values() for point in line if not math.isnan(point[1])]
    if not points:
        return "<p>Nothing was evaluated.</p>"
    values = [value for _, value in points] + ([target] if target is not None else [])
    low, high = _limits(min(values), max(values))
    last = max(round for round, _ in points)
    scale = _Scale(last, low, high)
    drawn = [_grid(scale), *(_path(scale, line, number % COLOURS) for number, line in enumerate(lines.values()))]
    if target is not None:
        drawn.append(
            f'<line class="target" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{scale.y(target)}" y2="{scale.y(target)}"/>'
        )
    picture = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">{"".join(drawn)}</svg>'
    return f"<figure>{picture}{_legend(lines)}<figcaption>{escape(label)}</figcaption></figure>"


class _Scale:
    """From rounds and values to places in the picture."""

    def __init__(self, last: int, low: float, high: float) -> None:
        self.last, self.low, self.high = last, low, high

    def x(self, round: float) -> float:
        first = min(1, self.last - 1)
        share = (round - first) / max(1, self.last - first)
        return _short(LEFT + share * (WIDTH - LEFT - RIGHT))

    def y(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return _short(HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM))


def _limits(low: float, high: float) -> tuple[float, float]:
    """Accuracies are shown on the scale from 0 to 1, everything else on its own."""
    if low >= 0 and high <= 1:
        return 0.0, 1.0
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _grid(scale: _Scale) -> str:
    parts = []
    for step in range(5):
        value = scale.low + step / 4 * (scale.high - scale.low)
        y = scale.y(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{value:.3g}</text>')
    for round in sorted({1, (scale.last + 1) // 2, scale.last}):
        anchor = "end" if round == scale.last and scale.last > 1 else "middle"
        parts.append(f'<text x="{scale.x(round)}" y="{HEIGHT - 8}" text-anchor="{anchor}">round {round}</text>')
    return "".join(parts)


def _path(scale: _Scale, line: Line, colour: int) -> str:
    known = [(scale.x(round), scale.y(value)) for round, value in line if not math.isnan(value)]
    if len(known) == 1:
        return f'<circle class="c{colour}" cx="{known[0][0]}" cy="{known[0][1]}" r="3"/>'
    points = " ".join(f"{x},{y}" for x, y in known)
    return f'<polyline class="c{colour}" points="{points}"/>'


def _legend(lines: Mapping[str, Line]) -> str:
    items = (f'<span><i class="c{i % COLOURS}"></i>{escape(name)}</span>' for i, name in enumerate(lines))
    return f'<div class="legend">{"".join(items)}</div>'


def _short(value: float) -> float:
    return round(value, 1)
