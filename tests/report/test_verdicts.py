"""The report's first line and table: verdicts by Holm in the metric's direction, none while runs are going on."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from fedalloy.report.page import page
from fedalloy.results.conclusion import conclusion
from fedalloy.results.looks import Look
from fedalloy.results.outcome import RunOutcome
from fedalloy.results.summaries import RunSummary

BASE = (0.50, 0.52, 0.48, 0.51)
CLEAR = (0.10, 0.11, 0.09, 0.10)
"""Differences that decide, whatever the correction."""


def summaries(
    differences: Mapping[str, Sequence[float]], higher: bool | None = True, states: Mapping[Any, str] | None = None
) -> list[RunSummary]:
    """``first`` with the scores of BASE, and others that differ from it; ``states`` by name and seed."""
    found = []
    for name, apart in {"first": (0.0,) * len(BASE), **differences}.items():
        for seed, value in enumerate(apart):
            outcome = RunOutcome(
                name, seed, (states or {}).get((name, seed), "finished"), round=3, rounds=3, metric="score",
                scores={"mean": BASE[seed] + value}, higher_is_better=higher,
            )  # fmt: skip
            directions = {"higher_is_better": {"score": higher}}
            found.append(RunSummary(outcome, {"name": name}, directions, {"clients": 5}, (), ()))
    return found


def rows(text: str) -> dict[str, list[tuple[str, str]]]:
    """The differences: class and text of every cell, by algorithm."""
    inside = text[text.index('<section id="results"') :]
    inside = inside[: inside.index("</table>")]
    found = {}
    for line in inside.split("<tr>")[2:]:
        cells = re.findall(r'<t[dh](?: scope="row")?(?: class="([^"]*)")?[^>]*>(?:<span[^>]*></span>)?([^<]*)<', line)
        found[cells[0][1]] = cells[1:]
    return found


def test_the_first_line_is_the_conclusion():
    runs = summaries({"good": CLEAR, "same": (0.1, -0.1, 0.1, -0.1)})
    said = conclusion([run.outcome for run in runs])
    assert said.startswith("good beats first in score")
    text = page(runs)
    assert f'</h1>\n<p class="lead verdict">{said}</p>' in text
    assert text.index(said) < text.index('<section id="results"') < text.index('<section id="curves"')
    assert "No verdict" not in page(runs[:4])


@pytest.mark.parametrize(("higher", "verdict", "colour"), [(True, "better", "up"), (False, "worse", "down")])
def test_verdict_and_colour_follow_the_direction(higher, verdict, colour):
    ((kind, said), (also, interval), *_) = rows(page(summaries({"other": CLEAR}, higher)))["other"]
    assert (said, kind, also) == (verdict, f"text {colour}", colour)
    assert interval.startswith("+0.100 [+0.0"), "the sign is that of the difference"


def test_without_a_direction_there_is_no_colour():
    ((kind, said), (also, _), *_) = rows(page(summaries({"other": CLEAR}, None)))["other"]
    assert (said, kind, also) == ("higher", "text", "")


def test_what_is_not_decided_has_no_colour_and_nothing_is_bold_for_being_first():
    text = page(summaries({"other": (0.10, -0.02, 0.08, 0.01)}))  # further than one standard deviation from zero
    ((kind, said), (also, _), *_) = rows(text)["other"]
    assert (said, kind, also) == ("undecided", "text", "")
    body = text[text.index("<main>") : text.index("</main>")]
    assert 'class="best"' not in body
    assert 'class="up"' not in body
    assert "Best mean" not in body


@pytest.mark.parametrize("state", ["running", "interrupted", "stopped"])
def test_while_a_run_is_open_there_is_no_verdict_and_no_p(state):
    runs = summaries({"good": CLEAR, "other": CLEAR}, states={("other", 3): state})
    text = page(runs)
    assert '<p class="lead verdict">No verdict yet: 1 run of 12 did not finish.</p>' in text
    for cells in rows(text).values():
        assert cells[0] == ("text", "no verdict yet")
        assert cells[2][1] == ""


def test_a_failed_run_is_named_and_worse_than_any_other():
    text = page(summaries({"good": CLEAR}, states={("good", 3): "failed"}))
    assert "No method beats first" in text
    assert "Failed, which is worse than any result: 1 of 4 runs of good." in text
    assert rows(text)["good"][1][1] == "+0.095", "the median, without an interval"
    assert "good, seed 3: failed in round 3" in text


@pytest.mark.parametrize("seeds", [1, 2])
def test_few_seeds_decide_nothing(seeds):
    text = page([run for run in summaries({"good": CLEAR}) if run.seed < seeds])
    assert f"No verdict over {seeds} seed" in text
    assert rows(text)["good"][0] == ("text", "too few seeds")


def test_simultaneous_intervals_are_labelled_and_a_verdict_by_holm_alone_is_explained():
    step = 0.0303  # decides after Holm's first step, while Bonferroni's interval over both covers zero
    runs = summaries({"good": CLEAR, "close": tuple(0.05 + sign * step for sign in (1, -1, 0.5, -0.5))})
    text = page(runs)
    assert "2 simultaneous intervals at 96 %; verdicts follow Holm." in text
    assert "(Holm): decided although the interval covers zero" in text
    cells = rows(text)["close"]
    low, high = map(float, re.findall(r"[-+][\d.]+", cells[1][1])[1:])
    assert low < 0 < high
    assert cells[0] == ("text up", "better (Holm)")


def test_a_recorded_look_makes_the_next_one_stricter():
    runs = summaries({"good": CLEAR})
    before = Look((0, 1, 2), ("first", "good"), 3, "score", None)
    widths = []
    for looks in ((), (before,)):
        low, high = map(float, re.findall(r"[-+][\d.]+", rows(page(runs, looks=looks))["good"][1][1])[1:])
        widths.append(high - low)
    assert widths[1] > widths[0]


def test_overflow_is_shown_in_words():
    text = page(summaries({"lost": (math.inf,) * 4}, higher=False))
    assert "nan" not in text[text.index("<main>") : text.index("</main>")].lower().replace("dominant", "")
