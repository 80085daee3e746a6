"""The kinds of pictures, and the functions that draw them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fedalloy.core.errors import SpecError, nearest
from fedalloy.report.plots import canvas, learned, line, mixture, plane, recorded, reliability
from fedalloy.report.plots.canvas import Options

Draw = Callable[[Any, Sequence[Path], Options], None]

KINDS: dict[str, Draw] = {
    "curves": recorded.draw_curves, "clients": recorded.draw_clients, "weights": recorded.draw_contributions,
    "gains": recorded.draw_gains, "fairness": recorded.draw_fairness, "participation": recorded.draw_participation,
    "lambda": mixture.draw, "reliability": reliability.draw, "line": line.draw, "plane": plane.draw,
    "rows": learned.draw_rows, "variance": learned.draw_variance,
}  # fmt: skip
SEVERAL = frozenset({"curves", "clients", "gains", "fairness", "participation", "rows", "variance"})
"""Kinds that accept several runs, or several tables of learned weights; ``weights`` accepts several tables too."""


def draw(kind: str, runs: Sequence[Path], output: Path, options: Options | None = None) -> None:
    """Draw one picture into a file."""
    if kind not in KINDS:
        raise SpecError(f"unknown picture '{kind}': {nearest(kind, KINDS)}")
    drawer = _drawer(kind, runs)
    if kind not in SEVERAL and drawer is not learned.draw_weights and len(runs) != 1:
        raise SpecError(f"'{kind}' shows one run, not {len(runs)}; {', '.join(sorted(SEVERAL))} show several")
    canvas.check_suffix(output)
    chosen = options or Options()
    with canvas.sheet(chosen.width) as (figure, axes):
        drawer(axes, runs, chosen)
        canvas.save(figure, output)


def _drawer(kind: str, runs: Sequence[Path]) -> Draw:
    """``weights`` are those of a run's contributions, or of a learned table."""
    tables = bool(runs) and all(run.is_file() for run in runs)
    return learned.draw_weights if kind == "weights" and tables else KINDS[kind]
