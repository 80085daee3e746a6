"""Which pictures there are, and what each may be asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from fedalloy.core.errors import SpecError, nearest
from fedalloy.report.plots import canvas

KINDS = {
    "curves": "curves", "lambda": "mixture", "reliability": "reliability", "line": "line", "plane": "plane",
    "weights": "weights", "rows": "rows", "variance": "variance",
}  # fmt: skip
"""Kind and the file that draws it."""
OF_TABLES = ("weights", "rows", "variance")
"""Kinds that show tables of learned weights instead of runs."""
SEVERAL = ("curves", *OF_TABLES)
"""Kinds that show more than one run, or one table, at a time."""


@dataclass(frozen=True)
class Options:
    """``metric``: what is shown; ``points``: how finely; ``clients``: of how many, where models are scored anew."""

    metric: str | None = None
    points: int = 21
    clients: int = 20


Draw = Callable[[Any, Sequence[Path], Options], None]


def draw(kind: str, runs: Sequence[Path], output: Path, options: Options | None = None) -> None:
    """Draw one picture into a file."""
    if kind not in KINDS:
        raise SpecError(f"unknown picture '{kind}': {nearest(kind, KINDS)}")
    if kind not in SEVERAL and len(runs) != 1:
        raise SpecError(f"'{kind}' shows one run, not {len(runs)}; several are shown by {', '.join(SEVERAL)}")
    canvas.check_suffix(output)
    figure, axes = canvas.sheet()
    drawer: Draw = import_module(f"fedalloy.report.plots.{KINDS[kind]}").draw
    drawer(axes, runs, options or Options())
    canvas.save(figure, output)
