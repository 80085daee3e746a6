"""One colour per algorithm, the same on every page and in every picture.

The colours are distinct for readers with any of the common colour vision deficiencies and have enough contrast on light
and dark backgrounds (``tests/report/test_palette.py`` measures both). With more algorithms than colours, lines also
differ by their dashes.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

LIGHT = ("#004adc", "#b5480f", "#00a25d", "#e565b2", "#c88700", "#5088f7", "#40575c", "#5f139b")
DARK = ("#5292f1", "#ea7437", "#0ac87f", "#f5a4c6", "#e5d03b", "#abc2ff", "#858b86", "#885bff")
"""The same slots on light and dark backgrounds."""
DASHES: tuple[tuple[int, ...], ...] = ((), (7, 4), (2, 3), (9, 3, 2, 3))
"""Lengths of strokes and gaps for the first, second, ... pass through the colours."""
# Common methods have the same colour in every comparison.
KNOWN = {"fedavg": 0, "fedprox": 1, "scaffold": 2, "fednova": 3, "fedavgm": 4, "fedadam": 5, "fedsgd": 6, "fedadp": 7}


@dataclass(frozen=True)
class Style:
    """The style of an algorithm: a slot of the palette and a dash pattern."""

    slot: int
    pattern: int = 0

    @property
    def light(self) -> str:
        """The colour on a light background."""
        return LIGHT[self.slot]

    @property
    def dash(self) -> tuple[int, ...]:
        """Strokes and gaps in pixels; empty for a full line."""
        return DASHES[self.pattern]

    def to_json(self) -> dict[str, Any]:
        """Plain values for the page's script."""
        return {"slot": self.slot, "dash": list(self.dash)}


def assign(names: Iterable[str]) -> dict[str, Style]:
    """A style for every name; it depends on the set of names, not on their order.

    Every name has a preferred slot and gets the next free one if that is taken.

    >>> assign(["mine", "fedavg"])["fedavg"]
    Style(slot=0, pattern=0)
    """
    styles: dict[str, Style] = {}
    for name in sorted(set(names), key=lambda name: (name.lower() not in KNOWN, name)):
        styles[name] = _free(_favourite(name), set(styles.values()))
    return styles


def css() -> str:
    """The palette as custom properties ``--c0`` to ``--c7`` for both themes."""
    light, dark = _properties(LIGHT), _properties(DARK)
    return (
        f":root {{ {light} }}\n@media (prefers-color-scheme: dark) {{ :root:not([data-theme=light]) {{ {dark} }} }}\n"
        f":root[data-theme=dark] {{ {dark} }}\n"
    )


def _properties(colours: Iterable[str]) -> str:
    return " ".join(f"--c{slot}: {colour};" for slot, colour in enumerate(colours))


def _favourite(name: str) -> int:
    return KNOWN.get(name.lower(), zlib.crc32(name.encode()) % len(LIGHT))


def _free(slot: int, used: set[Style]) -> Style:
    """The first free style, beginning with the preferred slot; dashes only when all colours are taken."""
    count = len(LIGHT)
    for pattern in range(len(DASHES)):
        for step in range(count):
            style = Style((slot + step) % count, pattern)
            if style not in used:
                return style
    # More names than styles: the rest share the last pattern and differ only by their labels.
    return Style(slot, len(DASHES) - 1)
