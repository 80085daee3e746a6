"""One browser and one report per test session; without a browser every test here skips and says why."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser import chromium

WAIT = 60
"""Seconds after which a page that did not do what it should is called broken; busy machines are slow."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="session")
def downloads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("downloads")


@pytest.fixture(scope="session")
def driver(downloads: Path) -> Iterator[Any]:
    pytest.importorskip("selenium", reason="the browser tests need selenium (make env)")
    if chromium.programs() is None:
        pytest.skip("no Chromium with chromedriver; scripts/browser.sh installs them where it may")
    with chromium.chromium(downloads) as started:
        yield started


@pytest.fixture
def browser(driver: Any) -> Iterator[Any]:
    """The browser at its usual size, with empty logs."""
    chromium.resize(driver, 1200)
    for log in ("browser", "performance"):
        driver.get_log(log)
    yield driver
    driver.get("about:blank")


@pytest.fixture(scope="session")
def wait(driver: Any) -> Any:
    """``wait(condition)`` polls until ``condition()`` is true; no test sleeps for a fixed time."""
    from selenium.webdriver.support.ui import WebDriverWait

    def until(condition: Any, why: str = "") -> Any:
        return WebDriverWait(driver, WAIT, 0.05).until(lambda _: condition(), why)

    return until


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small comparison that fills every section: weights by layer, info, failures, personal models, two seeds."""
    from fedalloy.experiment.recipe import parse
    from fedalloy.studies.compare.comparing import compare

    folder = tmp_path_factory.mktemp("runs")
    recipe = parse({
        "description": "A small comparison.",
        "task": {"model": {"kind": "mlp", "hidden": [8]}},
        "partition": {"kind": "dirichlet", "alpha": 0.3, "clients": 6},
        "devices": {"success": 0.8, "seconds_per_step": 0.01, "seconds_per_megabyte": 1.0},
        "sampling": {"kind": "uniform", "cohort": 4},
        "algorithm": {"lr": 0.5, "batch_size": 64},
        "run": {"rounds": 4, "seeds": [0, 1], "target": 0.3},
        "compare": [
            {"name": "fedavg", "set": {"algorithm.name": "fedavg"}},
            {"name": "by layer", "set": {"algorithm.name": "fedlayerwise"}},
            {"name": "superfed", "set": {"algorithm.name": "superfed_mm", "algorithm.start": 0.0}},
        ],
    })  # fmt: skip
    compare(recipe, folder, processes=1)
    return folder


@pytest.fixture(scope="session")
def report(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from fedalloy.report.page import write_page

    page = tmp_path_factory.mktemp("report") / "report.html"
    write_page([runs], page)
    return page
