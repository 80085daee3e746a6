"""The style sheet and the script of pages, both inside the package."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from fedalloy.report import palette

SCRIPTS = ("charts.js", "figures.js", "page.js")


@cache
def style() -> str:
    """The style sheet: palette and theme."""
    return palette.css() + _read("theme.css")


@cache
def script() -> str:
    """The script of a page: the drawing library with its licence, charts, figures and the page, in this order."""
    licence = _read("vendor/LICENSE-d3.txt").replace("*/", "")
    parts = [f"/*\n{licence}*/", _read("vendor/d3.min.js"), *map(_read, SCRIPTS)]
    # A closing script tag inside a string would end the script element.
    return "\n".join(parts).replace("</script", "<\\/script")


def _read(name: str) -> str:
    return files("fedalloy.report").joinpath("assets", *name.split("/")).read_text(encoding="utf-8")
