"""What results have in common: a short ``repr``, HTML in notebooks, tables of pandas, pictures, a page."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any

_SHOWING = "fedalloy.report.showing"
"""Loaded when something is shown: it reads records, and may need pandas or matplotlib."""


def tinted(colour: str, what: str = "stroke") -> str:
    """A style with a colour that is visible on light and on dark paper, as it is mixed with the colour of the text
    there. (A page cannot ask a notebook for its theme, but text always has the right colour.)"""
    return f"{what}:{colour};{what}:color-mix(in srgb,{colour} 75%,currentColor)"


def brief(rule: Any) -> str:
    """A rule with the fields that differ from their defaults."""
    if not is_dataclass(rule):
        return repr(rule)
    shown = [one for one in fields(rule) if one.repr and getattr(rule, one.name) != _default(one)]
    return f"{type(rule).__name__}({', '.join(f'{one.name}={brief(getattr(rule, one.name))}' for one in shown)})"


def _default(one: Field[Any]) -> Any:
    return one.default_factory() if one.default_factory is not MISSING else one.default


class Shown:
    """Shown as HTML in a notebook."""

    def _repr_html_(self) -> str:
        return str(_how("html")(self))


class ShownRuns(Shown):
    """One or several runs: also as tables of pandas, as a picture of matplotlib, and as a page."""

    def to_pandas(self, table: str | None = None) -> Any:
        """A ``pandas.DataFrame``: ``rounds``, ``clients``, ``weights`` or ``results``.

        The default is ``rounds`` for one run, and ``results`` (one row per run) for several.
        """
        return _how("frame")(self, table)

    def plot(self, kind: str = "curves", *, metric: str | None = None, ax: Any = None) -> Any:
        """Draw into axes of matplotlib (new ones by default), and return them; the kinds are those of
        ``fedalloy plot``."""
        return _how("plot")(self, kind, metric, ax)

    def report(self, path: str | Path = "report.html") -> Path:
        """Write the page of ``fedalloy report``; returns its path."""
        return Path(_how("page")(self, Path(path)))


def _how(name: str) -> Callable[..., Any]:
    from fedalloy.core import registry  # loads torch, which reading records does without

    found: Callable[..., Any] = getattr(registry.load(_SHOWING), name)
    return found
