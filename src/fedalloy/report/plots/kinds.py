"""Which pictures there are, and who draws them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fedalloy.core.errors import SpecError, nearest
from fedalloy.report.plots import (
    canvas,
    clients,
    contributions,
    curves,
    fairness,
    line,
    mixture,
    participation,
    plane,
    reliability,
    rows,
    variance,
    weights,
)
from fedalloy.report.plots.canvas import Options

Draw = Callable[[Any, Sequence[Path], Options], None]

KINDS: dict[str, Draw] = {
    "curves": curves.draw, "clients": clients.draw, "weights": contributions.draw, "fairness": fairness.draw,
    "participation": participation.draw, "lambda": mixture.draw, "reliability": reliability.draw, "line": line.draw,
    "plane": plane.draw, "rows": rows.draw, "variance": variance.draw,
}  # fmt: skip
SEVERAL = frozenset({"curves", "clients", "fairness", "participation", "rows", "variance"})
"""Those that show several runs, or several tables of learned weights; ``weights`` shows several tables too."""


def draw(kind: str, runs: Sequence[Path], output: Path, options: Options | None = None) -> None:
    """Draw one picture into a file."""
    if kind not in KINDS:
        raise SpecError(f"unknown picture '{kind}': {nearest(kind, KINDS)}")
    drawer = _drawer(kind, runs)
    if kind not in SEVERAL and drawer is not weights.draw and len(runs) != 1:
        raise SpecError(f"'{kind}' shows one run, not {len(runs)}; {', '.join(sorted(SEVERAL))} show several")
    canvas.check_suffix(output)
    chosen = options or Options()
    with canvas.sheet(chosen.width) as (figure, axes):
        drawer(axes, runs, chosen)
        canvas.save(figure, output)


def _drawer(kind: str, runs: Sequence[Path]) -> Draw:
    """Weights are those of a run's contributions, or of a table that was learned in advance."""
    tables = bool(runs) and all(run.is_file() for run in runs)
    return weights.draw if kind == "weights" and tables else KINDS[kind]
