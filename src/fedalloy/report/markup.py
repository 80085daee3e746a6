"""HTML from small pure functions, which escape everything that comes from a run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from fedalloy.results.statistics import Spread


@dataclass(frozen=True)
class Cell:
    """What a cell shows, the number it is sorted by (None sorts last, '' by text), and its class."""

    text: str
    value: float | str | None = ""
    kind: str = ""
    colour: str = ""


def spread(found: Mapping[str, Any] | None, digits: int = 3, signed: bool = False, kind: str = "") -> Cell:
    """Mean ± deviation over seeds."""
    if found is None or found["mean"] is None:
        return Cell("not finite" if found and found.get("overflowed") else "", None, kind)
    said = Spread(found["mean"], found.get("deviation"), found["count"]).text(digits, signed)
    return Cell(said, found["mean"], kind)


def count(value: float | None, digits: int | None = None) -> Cell:
    """A number; empty for None."""
    if value is None:
        return Cell("", None)
    return Cell(f"{value:,}" if digits is None else f"{value:,.{digits}f}", value)


def text(words: object) -> Cell:
    """Left-aligned text."""
    return Cell(str(words), "", "text")


def named(name: str, styles: Mapping[str, Mapping[str, Any]]) -> Cell:
    """An algorithm's name with its colour."""
    return Cell(name, "", "text", f"var(--c{styles[name]['slot']})" if name in styles else "")


def table(
    label: str, head: Sequence[str], body: Iterable[Sequence[Cell]], sortable: bool = True, kind: str = ""
) -> str:
    """A table that scrolls sideways on a small screen and sorts by a click on a heading."""
    rows = [list(row) for row in body]
    kinds = [cell.kind if cell.kind == "text" else "" for cell in rows[0]] if rows else [""] * len(head)
    top = "".join(_heading(name, kind, sortable) for name, kind in zip(head, kinds, strict=True))
    lines = "".join(f"<tr>{''.join(_cell(cell, place == 0) for place, cell in enumerate(row))}</tr>" for row in rows)
    inside = f"<table><thead><tr>{top}</tr></thead><tbody>{lines}</tbody></table>"
    return f'<div class="wide {kind}" tabindex="0" role="region" aria-label="{escape(label)}">{inside}</div>'


def figure(chart: str, start: Mapping[str, Any] | None = None, **data: str) -> str:
    """The element of a chart, named by its key in the page's data."""
    more = "".join(f' data-{name}="{escape(value)}"' for name, value in data.items())
    begin = f' data-start="{escape(json.dumps(dict(start)))}"' if start else ""
    return f'<div data-chart="{escape(chart)}"{begin}{more}></div>'


def pair(figures: Sequence[str]) -> str:
    """Figures side by side where there is room."""
    return f'<div class="pair">{"".join(figures)}</div>' if figures else ""


def section(place: str, title: str, *parts: str) -> str:
    """A part of the page."""
    heading = f'<h2 id="{place}-title">{escape(title)}</h2>'
    return f'<section id="{place}" aria-labelledby="{place}-title">{heading}{"".join(parts)}</section>'


def paragraph(words: str, kind: str = "") -> str:
    """Words."""
    return f"<p{f' class={chr(34)}{kind}{chr(34)}' if kind else ''}>{escape(words)}</p>"


def empty(words: str) -> str:
    """Why there is nothing to show, and what would change that."""
    return paragraph(words, "empty")


def code(words: str) -> str:
    """Text with a button that copies it."""
    button = '<button type="button" data-action="copy">Copy</button>'
    return f'<div class="copied">{button}<pre tabindex="0">{escape(words)}</pre></div>'


def details(summary: str, inside: str) -> str:
    """A collapsed block."""
    return f"<details><summary>{escape(summary)}</summary>{inside}</details>"


def plain_json(value: Any) -> str:
    """JSON for a script element, escaped so that it cannot end that element."""
    written = json.dumps(value, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    return written.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026").replace("\u2028", "\\u2028")


def _heading(name: str, kind: str, sortable: bool) -> str:
    inside = f'<button type="button" data-action="sort">{escape(name)}</button>' if sortable and name else escape(name)
    return f'<th scope="col"{_class(kind)}>{inside}</th>' if name else "<td></td>"


def _cell(cell: Cell, first: bool) -> str:
    value = "" if cell.value == "" else f' data-value="{"" if cell.value is None else cell.value}"'
    mark = f'<span class="swatch" style="background:{cell.colour}"></span>' if cell.colour else ""
    tag, scope = ("th", ' scope="row"') if first else ("td", "")
    return f"<{tag}{scope}{_class(cell.kind)}{value}>{mark}{escape(cell.text)}</{tag}>"


def _class(kind: str) -> str:
    return f' class="{kind}"' if kind else ""
