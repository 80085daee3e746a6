"""``--allow-imports``: a recipe may bring code from the current folder, when whoever gives the command says so."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer


def allow_imports(wanted: bool) -> bool:
    """Look for modules in the current folder too; last, so that nothing installed is hidden by them."""
    here = os.getcwd()
    if wanted and here not in sys.path:
        sys.path.append(here)
        # Processes that this one starts find the same modules.
        os.environ["PYTHONPATH"] = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), here])
    return wanted


def forget_current_folder() -> None:
    """``python -m`` looks for modules in the current folder first: not here, unless PYTHONPATH says so."""
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
