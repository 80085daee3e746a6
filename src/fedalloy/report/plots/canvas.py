"""A matplotlib figure without a window or global state, with the width of a column of a paper; and the options of
pictures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedalloy.core.errors import SpecError, nearest

SUFFIXES = ("pdf", "png", "svg")
WIDTHS = {"column": 3.35, "page": 6.9}
"""Inches: one column and the whole width of a two-column paper."""
# Text of a figure should be as large as that of its caption; fonts are embedded, as publishers require.
STYLE: Any = {
    "font.size": 8, "axes.titlesize": 8, "axes.labelsize": 8, "xtick.labelsize": 7, "ytick.labelsize": 7,
    "legend.fontsize": 7, "legend.frameon": False, "axes.spines.top": False, "axes.spines.right": False,
    "axes.linewidth": 0.6, "lines.linewidth": 1.2, "axes.grid": True, "grid.alpha": 0.3, "grid.linewidth": 0.4,
    "pdf.fonttype": 42, "svg.fonttype": "none", "savefig.dpi": 300,
}  # fmt: skip


@dataclass(frozen=True)
class Options:
    """``metric``: what is shown; ``points``: the resolution; ``clients``: how many, where models are scored again;
    ``width``: that of the picture."""

    metric: str | None = None
    points: int = 21
    clients: int = 20
    width: str = "column"


@contextmanager
def sheet(width: str = "column", shape: float = 0.72) -> Iterator[tuple[Any, Any]]:
    """A figure and its axes; ``shape`` is height over width."""
    if width not in WIDTHS:
        raise SpecError(f"unknown width '{width}': {nearest(width, WIDTHS)}")
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError:
        raise SpecError("drawing needs matplotlib: install it with pip install 'fedalloy[report]'") from None
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(WIDTHS[width], WIDTHS[width] * shape), layout="constrained")
        yield figure, figure.add_subplot()


def whole_numbers(*sides: Any) -> None:
    """Only whole numbers on these axes, for rounds and clients."""
    from matplotlib.ticker import MaxNLocator

    for side in sides:
        side.set_major_locator(MaxNLocator(nbins=6, integer=True))


def check_suffix(path: Path) -> None:
    """Refuse a picture of unknown format before anything is computed."""
    suffix = path.suffix.removeprefix(".").lower()
    if suffix not in SUFFIXES:
        raise SpecError(f"a picture as '{path.name}': the file ending selects the format; {nearest(suffix, SUFFIXES)}")


def save(figure: Any, path: Path) -> None:
    """Write the picture."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
