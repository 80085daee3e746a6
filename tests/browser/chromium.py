"""A headless Chromium for tests and screenshots; nothing is fetched, what is not installed is said."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
    "--force-color-profile=srgb", "--force-prefers-reduced-motion",
)  # fmt: skip


def programs() -> tuple[str, str] | None:
    """The browser and its driver, or None."""
    browser = os.environ.get("FEDALLOY_BROWSER") or next(filter(None, map(shutil.which, BROWSERS)), None)
    driver = shutil.which("chromedriver")
    return (browser, driver) if browser and driver else None


@contextmanager
def chromium(downloads: Path | None = None, width: int = 1200, height: int = 900) -> Iterator[Any]:
    """A driver with logs of the console and of the network; whatever it started is ended."""
    from selenium.webdriver import Chrome
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    found = programs()
    assert found is not None, "no Chromium; run scripts/browser.sh"
    options = Options()
    options.binary_location = found[0]
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        for flag in (*FLAGS, f"--window-size={width},{height}", f"--user-data-dir={profile}"):
            options.add_argument(flag)
        driver = Chrome(options=options, service=Service(found[1]))
        try:
            if downloads is not None:
                allowed = {"behavior": "allow", "downloadPath": str(downloads)}
                driver.execute_cdp_cmd("Browser.setDownloadBehavior", allowed)
            resize(driver, width, height)
            yield driver
        finally:
            driver.quit()


def resize(driver: Any, width: int, height: int = 900) -> None:
    """The size of the page itself, whatever the smallest window is."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
