"""The page about several federations in a real browser: quiet, drawn, readable on a phone, accessible."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedalloy.report.page import write_page
from tests.browser import chromium
from tests.browser.test_report import serious_findings
from tests.results.test_federations import comparison

NAMES = ("fedavg", "fedprox", "a method with a very long name", "scaffold")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eleven federations in which the last algorithm is always worst; the first one has a single seed."""
    folder = tmp_path_factory.mktemp("federations")
    places = []
    for place in range(11):
        base = {name: 0.5 + 0.03 * (-rank if rank < 3 else -9) for rank, name in enumerate(NAMES)}
        scores = {name: tuple(value + 0.01 * (seed + place) + 0.002 * ((seed * rank + place) % 3)
                              for seed in range(4 if place else 1))
                  for rank, (name, value) in enumerate(base.items())}  # fmt: skip
        places.append(comparison(folder / f"data {place}", scores))
    write_page(places, folder / "page.html")
    return folder / "page.html"


@pytest.fixture
def opened(browser: Any, written: Path, wait: Any) -> Any:
    browser.get(written.as_uri())
    wait(lambda: browser.execute_script("return document.documentElement.dataset.ready") == "true")
    browser.execute_script("fedalloyCharts.drawAll()")
    return browser


def test_both_pictures_are_drawn_without_errors(opened):
    assert opened.get_log("browser") == []
    assert len(opened.find_elements("css selector", "[data-chart=federations] .interval circle")) == 33
    assert opened.find_elements("css selector", "[data-chart=federations] circle.decided")
    assert len(opened.find_elements("css selector", "[data-chart=ranks] .lead")) == 4
    assert opened.find_elements("css selector", "[data-chart=ranks] .joined")
    count = "return Object.values(JSON.parse(document.getElementById('fedalloy-data').textContent).charts)"
    rows = opened.execute_script(f"{count}.map((c) => [c.kind, fedalloyCharts.tableOf(c).rows.length])")
    assert dict(rows) == {"forest": 33, "ranks": 4}


@pytest.mark.parametrize("width", [390, 1000])
def test_it_fits_a_narrow_screen(opened, width):
    chromium.resize(opened, width)
    assert opened.execute_script("return document.documentElement.scrollWidth") <= width
    opened.execute_script("fedalloyCharts.redraw()")
    outside = (
        "return [...document.querySelectorAll('.place svg text')].filter((t) => { const b = t.getBoundingClientRect(),"
        " s = t.closest('svg').getBoundingClientRect(); return b.left < s.left - 2 || b.right > s.right + 2; })"
        ".map((t) => t.textContent)"
    )
    assert opened.execute_script(outside) == []


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_it_has_no_serious_accessibility_findings(opened, theme):
    opened.execute_script("fedalloyCharts.setTheme(arguments[0])", theme)
    assert serious_findings(opened) == []
