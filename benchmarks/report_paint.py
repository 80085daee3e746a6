"""How fast a report is shown: ``python -m benchmarks.report_paint report.html`` measures it in headless Chromium."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from selenium.webdriver.support.ui import WebDriverWait

from tests.browser.chromium import chromium

ASK = """
const paint = performance.getEntriesByName("first-contentful-paint")[0], loaded = performance.getEntriesByType("navigation")[0];
if (!paint || !loaded.loadEventEnd || document.documentElement.dataset.ready !== "true") return null;
const begin = performance.now();
fedalloyCharts.drawAll();
return {first_paint_ms: Math.round(paint.startTime), loaded_ms: Math.round(loaded.loadEventEnd),
  all_charts_ms: Math.round(performance.now() - begin), elements: document.querySelectorAll("*").length};
"""  # noqa: E501


def main() -> None:
    """Open the page three times; the first time includes the start of the browser."""
    for page in map(Path, sys.argv[1:]):
        with chromium() as driver:
            for _ in range(3):
                driver.get(page.resolve().as_uri())
                found = WebDriverWait(driver, 60, 0.05).until(lambda one: one.execute_script(ASK))
                print(json.dumps({"page": page.name, "bytes": page.stat().st_size, **found}))


if __name__ == "__main__":
    main()
