"""A sheet to draw on, without a window and without anything global."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedalloy.core.errors import SpecError, nearest

SUFFIXES = ("pdf", "png", "svg")


def sheet(width: float = 5.0, height: float = 3.6) -> tuple[Any, Any]:
    """A figure and its axes, in inches."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise SpecError("drawing needs matplotlib: install it with pip install 'fedalloy[report]'") from None
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def check_suffix(path: Path) -> None:
    """Refuse a picture of unknown format before anything is computed."""
    suffix = path.suffix.removeprefix(".").lower()
    if suffix not in SUFFIXES:
        raise SpecError(f"a picture as '{path.name}': the ending says the format; {nearest(suffix, SUFFIXES)}")


def save(figure: Any, path: Path) -> None:
    """Write the picture."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=200)
