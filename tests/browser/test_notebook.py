"""What a cell of a notebook shows, in a real browser, on light and on dark paper and in narrow cells."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import fedalloy
from tests.browser import chromium
from tests.browser.test_report import AXE

# Text and paper of JupyterLab's themes; a cell inherits nothing else from them.
THEMES = {"light": ("#212121", "#ffffff"), "dark": ("#e0e0e0", "#111111")}
SHOWN = ("result", "comparison", "task", "record")
LEAST_CONTRAST = 2.9
LOOK = """
const said = [], less = (a, b) => a < b - 1;
const out = (a, b) => less(a.left, b.left) || less(b.right, a.right) || less(a.top, b.top) || less(b.bottom, a.bottom);
for (const cell of document.querySelectorAll('section')) {
  const tell = (what) => said.push(cell.id + ': ' + what), box = (one) => one.getBoundingClientRect();
  const heads = [...cell.querySelectorAll('table th')], svg = cell.querySelector('svg');
  if (!heads.length || !svg) tell('no table or no picture');
  if (heads.some((one) => !one.textContent.trim())) tell('a column without a name');
  for (const one of cell.querySelectorAll('b, th, td, div > div')) {
    const text = one.textContent.trim(), {width, height} = box(one);
    if (text && (width < 4 || height < 8)) tell('hidden text ' + text);
    if (one.scrollWidth > one.clientWidth + 1 && getComputedStyle(one).display !== 'inline') tell('cut off ' + text);
  }
  for (const one of svg.querySelectorAll('text, polyline, rect'))
    if (out(box(one), box(svg))) tell('outside of the picture ' + (one.textContent || one.tagName));
  if (cell.firstChild.scrollWidth > cell.firstChild.clientWidth) tell('wider than the cell');
  if (/undefined|NaN|None|nan/.test(cell.textContent)) tell('a value that is none');
}
return said;
"""


@pytest.fixture(scope="module")
def cells(runs: Path) -> dict[str, str]:
    """One of everything that a cell shows."""
    from fedalloy.results.runs import read_outcomes
    from fedalloy.studies.compare.comparing import Comparison

    task = fedalloy.task("digits", "logistic", {"kind": "dirichlet", "alpha": 0.3}, 12)
    things = {
        "result": fedalloy.fit("fedavg", task, rounds=3, engine="batched"),
        "comparison": Comparison(runs, tuple(read_outcomes([runs])), ()),
        "task": task,
        "record": fedalloy.read_run(runs / "superfed" / "seed-0"),
    }
    return {name: thing._repr_html_() for name, thing in things.items()}


@pytest.fixture
def show(browser, tmp_path):
    """``show(fragments, theme, width)`` opens them as the cells of a page."""

    def opened(fragments: dict[str, str], theme: str, width: int) -> Any:
        text, paper = THEMES[theme]
        body = "".join(f"<section id={name}>{html}</section>" for name, html in fragments.items())
        style = f"body{{margin:8px;color:{text};background:{paper}}} section{{margin-bottom:16px}}"
        head = f"<head><title>Cells</title><meta charset=utf-8><style>{style}</style></head>"
        page = f"<!doctype html><html lang=en>{head}<body><main><h1>Cells</h1>{body}</main></body></html>"
        (tmp_path / "page.html").write_text(page)
        chromium.resize(browser, width)
        browser.get((tmp_path / "page.html").as_uri())
        return browser

    return opened


def picture(page: Any, selector: str) -> np.ndarray:
    """The pixels of an element."""
    clip = page.execute_script(
        "const b = document.querySelector(arguments[0]).getBoundingClientRect();"
        "return {x: b.left + scrollX, y: b.top + scrollY, width: b.width, height: b.height, scale: 1}",
        selector,
    )
    found = page.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip})
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(found["data"]))).convert("RGB"))


def contrast(pixels: np.ndarray, paper: str) -> np.ndarray:
    """Of every pixel with the paper, as WCAG defines it."""

    def bright(colours: np.ndarray) -> np.ndarray:
        part = colours / 255
        return np.where(part <= 0.04045, part / 12.92, ((part + 0.055) / 1.055) ** 2.4) @ [0.2126, 0.7152, 0.0722]

    one, other = bright(pixels) + 0.05, bright(np.array([int(paper[at : at + 2], 16) for at in (1, 3, 5)])) + 0.05
    return np.maximum(one, other) / np.minimum(one, other)


def coloured(pixels: np.ndarray) -> np.ndarray:
    """Pixels that are no grey: those of lines and bars, as text and axes have the colour of the text."""
    return pixels.max(-1).astype(int) - pixels.min(-1) > 40


def faults(page: Any, paper: str) -> list[str]:
    """Everything in the cells that a reader would miss."""
    found = page.execute_script(LOOK)
    return [*found, *(one for name in SHOWN for one in _unseen(page, name, paper))]


def _unseen(page: Any, name: str, paper: str) -> list[str]:
    pixels = picture(page, f"#{name} svg")
    drawn = coloured(pixels)
    if drawn.sum() < 60:
        return [f"{name}: nothing is drawn"]
    # Anti-aliasing blends the edges of lines with the paper, so the best tenth of the pixels counts.
    best = float(np.quantile(contrast(pixels[drawn], paper), 0.9))
    return [] if best >= LEAST_CONTRAST else [f"{name}: lines have a contrast of {best:.1f}"]


def inaccessible(page: Any) -> list[str]:
    page.execute_script(AXE.read_text(encoding="utf-8"))
    run = "const done = arguments[0]; axe.run(document).then((r) => done(r.violations.map((v) => v.id)))"
    return list(page.execute_async_script(run))


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("width", [900, 420])
def test_tables_and_curves_are_visible_and_nothing_is_cut_off(theme, width, cells, show):
    page = show(cells, theme, width)
    assert faults(page, THEMES[theme][1]) == []
    assert inaccessible(page) == []
    assert page.get_log("browser") == []
    messages = [entry["message"] for entry in page.get_log("performance")]
    assert not [one for one in messages if "requestWillBeSent" in one and '"url":"http' in one]


def test_the_look_finds_planted_faults(cells, show):
    wide = '<div style="overflow-x:auto"><div style="width:1200px">x</div>{}</div>'
    broken = {
        "result": cells["result"].replace("<th>mean</th>", "<th></th>"),
        "comparison": wide.format(cells["comparison"]),
        "task": cells["task"].replace("fill:", "was:"),
        "record": cells["record"].replace("stroke:", "was:").replace('text-anchor="middle"', 'dx="500"') + "nan",
    }  # fmt: skip
    said = "\n".join(faults(show(broken, "dark", 900), THEMES["dark"][1]))
    for fault in (
        "result: a column without a name", "comparison: wider than the cell", "task: nothing is drawn",
        "record: nothing is drawn", "record: outside of the picture", "record: a value that is none",
    ):  # fmt: skip
        assert fault in said


def test_a_line_that_is_dark_on_dark_paper_is_noticed(cells, show):
    untinted = {name: html.replace("color-mix(", "none(") for name, html in cells.items()}
    assert "result: lines have a contrast of 2" in "\n".join(faults(show(untinted, "dark", 900), THEMES["dark"][1]))
