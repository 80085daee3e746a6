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
    "curves": "curves", "clients": "clients", "weights": "contributions", "fairness": "fairness",
    "participation": "participation", "lambda": "mixture", "reliability": "reliability", "line": "line",
    "plane": "plane", "rows": "rows", "variance": "variance",
}  # fmt: skip
"""Kind and the file that draws it."""
SEVERAL = frozenset({"curves", "clients", "fairness", "participation", "rows", "variance"})
"""Those that show several runs, or several tables of learned weights; ``weights`` shows several tables too."""


@dataclass(frozen=True)
class Options:
    """``metric``: what is shown; ``points``: how finely; ``clients``: of how many, where models are scored anew;
    ``width``: of the picture."""

    metric: str | None = None
    points: int = 21
    clients: int = 20
    width: str = "column"


Draw = Callable[[Any, Sequence[Path], Options], None]


def draw(kind: str, runs: Sequence[Path], output: Path, options: Options | None = None) -> None:
    """Draw one picture into a file."""
    if kind not in KINDS:
        raise SpecError(f"unknown picture '{kind}': {nearest(kind, KINDS)}")
    file = _file(kind, runs)
    if kind not in SEVERAL and file != "weights" and len(runs) != 1:
        raise SpecError(f"'{kind}' shows one run, not {len(runs)}; {', '.join(sorted(SEVERAL))} show several")
    canvas.check_suffix(output)
    chosen = options or Options()
    drawer: Draw = import_module(f"fedalloy.report.plots.{file}").draw
    with canvas.sheet(chosen.width) as (figure, axes):
        drawer(axes, runs, chosen)
        canvas.save(figure, output)


def _file(kind: str, runs: Sequence[Path]) -> str:
    """Weights are those of a run's contributions, or of a table that was learned in advance."""
    tables = bool(runs) and all(run.is_file() for run in runs)
    return "weights" if kind == "weights" and tables else KINDS[kind]
