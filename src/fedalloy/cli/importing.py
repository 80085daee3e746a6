"""``--allow-imports``: lets a recipe import code from the current folder; without the option it cannot."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer


def allow_imports(wanted: bool) -> bool:
    """Search the current folder for modules too: last, so that they cannot shadow installed packages."""
    here = os.getcwd()
    if wanted and here not in sys.path:
        sys.path.append(here)
        # For child processes.
        os.environ["PYTHONPATH"] = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), here])
    return wanted


def forget_current_folder() -> None:
    """Undo what ``python -m`` does, search the current folder first, unless PYTHONPATH contains it."""
    listed = [os.path.abspath(one) for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one]
    if sys.path and os.path.abspath(sys.path[0]) == os.getcwd() and os.getcwd() not in listed:
        del sys.path[0]


AllowImports = Annotated[
    bool,
    typer.Option(
        "--allow-imports",
        callback=allow_imports,
        help="Let the recipe import modules from the current folder. Their code runs: only for recipes you trust.",
    ),
]
