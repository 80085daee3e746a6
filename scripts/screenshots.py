"""Make the pictures of the README from the demo's runs: ``python scripts/screenshots.py [RUNS]``.

Runs the demo first if its runs do not exist. Pictures are written to docs/images, which is part of the repository.
"""

from __future__ import annotations

import base64
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from fedalloy.report.live.server import LiveServer  # noqa: E402
from fedalloy.report.page import write_page  # noqa: E402 (the checkout first)
from tests.browser.chromium import chromium, resize  # noqa: E402

IMAGES = ROOT / "docs" / "images"
MOST_BYTES = 300_000


class Picture(NamedTuple):
    """What is shown: from the top of one element to the bottom of another, or as high as given."""

    name: str
    theme: str
    width: int
    first: str
    last: str
    height: int | None = None


PICTURES = (
    Picture("report-results", "light", 1100, "#results", "#results"),
    Picture("report-clients", "light", 1100, "#clients [data-chart]", "#clients [data-chart]"),
    Picture("report-weights", "light", 1100, "#weights", "#weights"),
    Picture("report-phone", "light", 390, "body", "body", 844),
    Picture("report-phone-dark", "dark", 390, "#curves", "#curves", 844),
)


def main() -> None:
    """All pictures."""
    runs = Path(sys.argv[1]) if len(sys.argv) > 1 else _demo()
    IMAGES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, chromium() as driver:
        page = Path(folder) / "report.html"
        write_page([runs], page)
        driver.get(page.as_uri())
        for picture in PICTURES:
            _keep(picture.name, _take(driver, picture))
        with LiveServer(runs, 0) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            _keep("live", _live(driver, server.url))
            server.shutdown()


def _keep(name: str, picture: bytes) -> None:
    path = IMAGES / f"{name}.png"
    path.write_bytes(picture)
    print(f"{path.relative_to(ROOT)}: {len(picture) // 1000} kB")
    assert len(picture) < MOST_BYTES, f"{path.name} is too large for a README"


def _demo() -> Path:
    runs = ROOT / "runs" / "demo"
    if not (runs / "comparison.json").is_file():
        command = [sys.executable, "-m", "fedalloy", "compare", "recipes/demo.toml", "-o", str(runs)]
        subprocess.run(command, cwd=ROOT, check=True)
    return runs


def _take(driver: Any, picture: Picture) -> bytes:
    resize(driver, picture.width, picture.height or 900)
    driver.execute_script("fedalloyCharts.setTheme(arguments[0]); fedalloyCharts.drawAll()", picture.theme)
    # After two frames everything has been laid out and drawn again.
    driver.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
    place = "return [document.querySelector(arguments[0]).getBoundingClientRect().top + scrollY,"
    place += " document.querySelector(arguments[1]).getBoundingClientRect().bottom + scrollY]"
    top, bottom = driver.execute_script(place, picture.first, picture.last)
    # The bar at the top is sticky; only pictures of a whole screen show it.
    hidden = "document.querySelector('.top').style.visibility = arguments[0]"
    driver.execute_script(hidden, "visible" if picture.first == "body" else "hidden")
    height = picture.height or bottom - top
    clip = {"x": 0, "y": top, "width": picture.width, "height": height, "scale": 1}
    found = driver.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip})
    return base64.b64decode(found["data"])


def _live(driver: Any, url: str) -> bytes:
    """The live page with two runs ticked."""
    from selenium.webdriver.support.ui import WebDriverWait

    resize(driver, 1100, 900)
    driver.get(url)
    WebDriverWait(driver, 60).until(lambda one: one.find_elements("css selector", "#runs .run"))
    tick = "document.querySelectorAll('#runs .run').forEach((one) => {"
    tick += " if (/(fedavg|scaffold)[/]seed-0/.test(one.textContent)) one.querySelector('input').click(); })"
    driver.execute_script("fedalloyCharts.setTheme('light')")
    driver.execute_script(tick)
    WebDriverWait(driver, 60).until(lambda one: len(one.find_elements("css selector", "path.line")) > 1)
    found = driver.execute_cdp_cmd("Page.captureScreenshot", {})
    return base64.b64decode(found["data"])


if __name__ == "__main__":
    main()
