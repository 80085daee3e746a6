"""The report in a real browser: complete, quiet, self-contained, and everything that can be pressed does something."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from tests.browser import chromium

SECTIONS = ("results", "curves", "what", "clients", "gains", "fairness", "weights", "info", "personal", "participation",
            "data", "cost", "reproduce")  # fmt: skip
AXE = Path(__file__).parent / "assets" / "axe.min.js"


@pytest.fixture
def page(browser, report, wait):
    """The open report, drawn to its end."""
    browser.get(report.as_uri())
    wait(lambda: browser.execute_script("return document.documentElement.dataset.ready") == "true", "never ready")
    browser.execute_script("fedalloyCharts.drawAll()")
    return browser


def data(page: Any) -> dict[str, Any]:
    return json.loads(page.execute_script("return document.getElementById('fedalloy-data').textContent"))


def one(page: Any, selector: str) -> Any:
    return page.find_element("css selector", selector)


def press(page: Any, element: Any) -> None:
    page.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", element)
    element.click()


def test_it_opens_without_errors_and_without_a_request(page, report):
    assert page.get_log("browser") == []
    messages = [json.loads(entry["message"])["message"] for entry in page.get_log("performance")]
    asked = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    assert [url for url in asked if not url.startswith(("data:", "blob:"))] == [report.as_uri()]


def test_every_section_is_there_and_every_visible_chart_is_drawn(page):
    found = {s.get_attribute("id"): s for s in page.find_elements("css selector", "main section")}
    assert tuple(found) == SECTIONS
    assert all(section.find_element("css selector", "h2").text for section in found.values())
    places = [place for place in page.find_elements("css selector", "[data-chart]") if place.is_displayed()]
    assert len(places) >= 12
    for place in places:
        assert place.find_elements("css selector", ".place svg *"), place.get_attribute("data-chart")
    links = [link.get_attribute("href").partition("#")[2] for link in page.find_elements("css selector", "nav a")]
    assert tuple(links) == SECTIONS


def test_the_theme_switches_and_heat_maps_follow(page):
    def look() -> tuple[str, str]:
        body = page.execute_script("return getComputedStyle(document.body).backgroundColor")
        return body, one(page, "#weights image").get_attribute("href")

    before, button = look(), one(page, "[data-action=theme]")
    button.click()
    after = look()
    assert before[0] != after[0]
    assert before[1] != after[1]
    button.click()
    assert look() == before


def test_tables_sort_both_ways(page):
    table = "#results [aria-label=Results]"

    def column() -> list[float]:
        cells = page.find_elements("css selector", f"{table} tbody tr td:nth-child(2)")
        return [float(cell.get_attribute("data-value")) for cell in cells]

    heading = one(page, f"{table} thead th:nth-child(2) button")
    press(page, heading)
    assert column() == sorted(column(), reverse=True)
    assert one(page, f"{table} thead th:nth-child(2)").get_attribute("aria-sort") == "descending"
    press(page, heading)
    assert column() == sorted(column())
    assert len(column()) == 3


def test_a_cell_of_a_heat_map_tells_what_it_is(page, wait):
    from selenium.webdriver import ActionChains

    cells, chart = one(page, "#weights .cells"), data(page)["charts"]["weights-0"]
    page.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", cells)
    rows, columns = len(chart["rows"]["labels"]), len(chart["columns"]["labels"])
    measure = "const b = arguments[0].getBoundingClientRect(); return [b.width, b.height]"

    def pointed():
        # The page may still be laid out when the pointer moves; like a reader, move it again then. The cell in row 2,
        # column 3, counted from one; offsets are from the middle.
        width, height = page.execute_script(measure, cells)
        x, y = width * (2.5 / columns - 0.5), height * (1.5 / rows - 0.5)
        ActionChains(page).move_to_element_with_offset(cells, round(x), round(y)).perform()
        return page.find_elements("css selector", ".tip:not([hidden])")

    wait(pointed, "no hint appeared")
    said = one(page, ".tip").text.splitlines()
    value = chart["panels"][0]["values"][1][2]
    assert said[0] == ("did not take part" if value is None else f"weight {float(f'{value:.4g}'):g}")
    assert said[1:] == [chart["rows"]["labels"][1], "round 3"]


def test_switching_the_axis_switches_it_in_all_curves(page):
    from selenium.webdriver.support.ui import Select

    select = one(page, "#curves [data-choice=axis]")
    page.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", select)
    Select(select).select_by_value("megabytes")
    figures = page.find_elements("css selector", "#curves [data-chart=curves]")
    labels = [[text.text for text in f.find_elements("css selector", "svg text.label")] for f in figures]
    assert len(labels) == 3
    assert all("megabytes sent and received so far" in some for some in labels)


def test_rounds_are_whole_numbers_on_every_axis(page):
    """Pictures of clients and rounds have a label per column instead of an axis."""
    found = page.execute_script("""
        return [...document.querySelectorAll('text.label')].filter((one) => /^round/.test(one.textContent))
          .map((one) => one.parentNode.querySelector('.axis:not(.grid)')).filter((axis) => axis)
          .map((axis) => [...axis.querySelectorAll('.tick text')].map((tick) => tick.textContent))""")
    assert len(found) >= 6
    assert all(ticks for ticks in found)
    assert [tick for ticks in found for tick in ticks if "." in tick] == []


def test_another_algorithm_can_be_chosen(page, wait):
    from selenium.webdriver.support.ui import Select

    select = one(page, "[data-shows=weights]")
    page.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", select)
    Select(select).select_by_index(1)
    shown = '[data-group=weights][data-member="1"]'
    wait(lambda: page.find_elements("css selector", f"{shown} svg image"), "the other chart was not drawn")
    assert len(page.find_elements("css selector", f"{shown} svg image")) == 2  # a panel per layer
    assert not one(page, '[data-group=weights][data-member="0"]').is_displayed()


def test_every_chart_has_a_table_and_can_be_saved(page, downloads, wait):
    figure, chart = one(page, "[data-chart=distribution]"), data(page)["charts"]["distribution"]
    buttons = {button.text: button for button in figure.find_elements("css selector", ".tools button")}
    press(page, buttons["Table"])
    rows = figure.find_elements("css selector", ".behind tbody tr")
    assert len(rows) == sum(len(group["values"]) for group in chart["groups"])
    for kind in ("CSV", "SVG", "PNG"):
        press(page, buttons[kind])
        wait((downloads / f"distribution.{kind.lower()}").exists, f"no {kind} arrived")
    with (downloads / "distribution.csv").open(newline="") as file:
        read = list(csv.DictReader(file))
    assert [float(row[chart["x"]]) for row in read] == [value for group in chart["groups"] for value in group["values"]]
    assert "var(--" not in (downloads / "distribution.svg").read_text()
    assert (downloads / "distribution.png").read_bytes().startswith(b"\x89PNG")


def test_all_kinds_of_charts_have_rows(page):
    count = "return Object.values(JSON.parse(document.getElementById('fedalloy-data').textContent).charts)"
    count += ".filter((c) => c.kind !== 'curves').map((c) => [c.kind, fedalloyCharts.tableOf(c).rows.length])"
    found = page.execute_script(count)
    assert {kind for kind, _ in found} == {"line", "strip", "sorted", "heat", "bars", "calibration"}
    assert all(rows > 0 for _, rows in found)


def serious_findings(page: Any) -> list[Any]:
    page.execute_script(AXE.read_text(encoding="utf-8"))
    found = page.execute_async_script("const done = arguments[0]; axe.run(document).then((r) => done(r.violations))")
    serious = [finding for finding in found if finding["impact"] in ("serious", "critical")]
    return [(finding["id"], [node["html"][:200] for node in finding["nodes"][:3]]) for finding in serious]


def test_the_check_for_accessibility_finds_planted_faults(browser):
    browser.get("data:text/html,<html lang=en><title>x</title><main><button></button><p style='color:%23ccc'>pale</p>")
    assert {name for name, _ in serious_findings(browser)} == {"button-name", "color-contrast"}


@pytest.mark.parametrize(("theme", "width"), [("light", 1200), ("dark", 360)])
def test_nothing_serious_stands_in_the_way_of_a_reader(page, theme, width):
    chromium.resize(page, width)
    page.execute_script("fedalloyCharts.setTheme(arguments[0])", theme)
    page.execute_script("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    page.execute_script("document.querySelectorAll('.tools [aria-expanded]').forEach((one) => one.click())")
    assert serious_findings(page) == []
    # Wide tables scroll inside their frames; the page itself never does.
    assert page.execute_script("return document.documentElement.scrollWidth") <= width


def test_printing_draws_everything_on_white(page):
    page.execute_script("fedalloyCharts.setTheme('dark'); dispatchEvent(new Event('beforeprint'))")
    assert page.execute_script("return document.documentElement.dataset.theme") == "light"
    page.execute_script("dispatchEvent(new Event('afterprint'))")
    assert page.execute_script("return document.documentElement.dataset.theme") == "dark"
