"""The live page in a browser: a running experiment grows before one's eyes and is stopped with a button."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.report.live.conftest import TOKEN, make_run
from tests.report.live.conftest import going as going
from tests.report.live.conftest import root as root
from tests.report.live.conftest import serving as serving

AXE = Path(__file__).parent / "assets" / "axe.min.js"


@pytest.fixture
def find(browser):
    return lambda selector: browser.find_elements("css selector", selector)


@pytest.fixture
def text(browser):
    return lambda selector: browser.execute_script(
        "return document.querySelector(arguments[0])?.textContent || ''", selector
    )


def faults(browser):
    return [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]


def test_a_running_experiment_grows_and_is_stopped(browser, wait, find, text, serving, going):
    run = going(rounds=40)
    browser.get(serving().server.url)
    wait(lambda: "round 1 of 40" in text(".card"), "a run that is going is shown at once")
    assert text(".card .state") == "running"
    run.play(3)
    wait(lambda: "round 4 of 40" in text(".card"))
    drawn = "return document.querySelector('#loss path.line')?.getAttribute('d')"
    wait(lambda: browser.execute_script(drawn))
    before = browser.execute_script(drawn)
    run.play(2)
    wait(lambda: browser.execute_script(drawn) not in (before, None), "the curve grows")
    assert "left" in text(".card")

    find(".card .stop")[0].click()
    wait(lambda: find("#token")[0].is_displayed())
    find("#token")[0].send_keys("not the token")
    find("#ask button.danger")[0].click()
    wait(lambda: "the token is missing or wrong" in text(".card"))
    assert not (run.folder / "stop").exists()

    find(".card .stop")[0].click()
    wait(lambda: find("#token")[0].is_displayed())
    find("#token")[0].send_keys(TOKEN)
    find("#ask button.danger")[0].click()
    wait(lambda: (run.folder / "stop").exists())
    wait(lambda: text(".card .stop") == "Stopping after this round")
    result = run.end()
    assert result is not None
    assert result.status == "stopped"
    assert result.ending.progress.round < 40
    wait(lambda: text(".card .state") == "stopped")
    assert not find(".card .stop")[0].is_displayed()
    refused = [entry for entry in faults(browser) if "403" not in entry["message"]]
    assert refused == []


def test_runs_are_searched_ticked_and_compared(browser, wait, find, text, serving, root):
    for name in ("fedavg", "scaffold", "<img src=x onerror=alert(1)>"):
        recipe = {"name": name, "run": {"rounds": 5, "seeds": [3], "target_metric": "accuracy"}}
        make_run(root / f"run-{len(name)}", recipe=recipe)
    browser.get(serving(token=None).server.url)
    wait(lambda: len(find("#runs .run")) == 3)
    assert text("#advice").startswith("Tick one or more runs")
    assert not find("#verdict")[0].is_displayed()
    find("#search")[0].send_keys("scaf")
    wait(lambda: len(find("#runs .run")) == 1)
    find("#runs input")[0].click()
    wait(lambda: text("#title") == "scaffold")
    find("#search")[0].clear()
    find("#search")[0].send_keys(" ")
    wait(lambda: len(find("#runs .run")) == 3)
    for box in range(3):
        if not find("#runs input")[box].is_selected():
            find("#runs input")[box].click()
            wait(lambda: find("#runs input")[box].is_selected())  # noqa: B023
    wait(lambda: text("#title") == "3 runs compared")
    wait(lambda: len(find("#curves path.line")) == 3)
    assert text("#verdict").startswith("All of these have ended")
    assert not find("#runs img"), "names are text"
    assert "not finite" in text("#events")
    assert not any(one.is_displayed() for one in find(".stop")), "without a token nothing can be stopped"
    browser.refresh()
    wait(lambda: text("#title") == "3 runs compared", "the address remembers what was ticked")
    assert faults(browser) == []


def test_there_is_no_verdict_while_a_run_is_open(browser, wait, text, serving, root):
    for name, state in (("fedavg", "finished"), ("scaffold", "stopped")):
        make_run(root / name, state=state, recipe={"name": name, "run": {"rounds": 5, "seeds": [3]}})
    browser.get(f"{serving().server.url}#run=fedavg&run=scaffold")
    wait(lambda: text("#verdict") == "Running: no verdict yet, 1 of 2 runs have not finished.")
    assert faults(browser) == []


def test_an_empty_folder_says_what_to_do(browser, wait, text, serving):
    browser.get(serving().server.url)
    wait(lambda: "Start one" in text("#count"))
    assert faults(browser) == []


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_live_page_has_no_serious_accessibility_findings(browser, wait, find, serving, root, theme):
    make_run(root / "a")
    browser.get(f"{serving().server.url}#run=a")
    wait(lambda: find("#curves path.line"))
    browser.execute_script("fedalloyCharts.setTheme(arguments[0])", theme)
    browser.execute_script(AXE.read_text(encoding="utf-8"))
    found = browser.execute_async_script("const done = arguments[0]; axe.run(document).then((r) => done(r.violations))")
    serious = [one for one in found if one["impact"] in ("serious", "critical")]
    said = [(one["id"], [node["html"] for node in one["nodes"]]) for one in serious]
    assert said == [], json.dumps(said, indent=1)
