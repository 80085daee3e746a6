"""The numbers of a page: their intervals are those of the verdicts, and runs without a value have none."""

from __future__ import annotations

import math

import pytest

from fedalloy.studies.reproduce.declaring import Claim, PaperExperiment
from fedalloy.studies.reproduce.page import write_page
from fedalloy.studies.reproduce.results import Measured, Results


def page(score: str, reused: float = 0.0, **methods: tuple[float, ...]) -> str:
    runs = [
        Measured("a", name, seed, "finished", 5, {score: value}, planned=5, reused=reused)
        for name, values in methods.items()
        for seed, value in enumerate(values)
    ]
    one = Claim(text="t", cases=["a"], method="m", score=score, relation="above", others=["b"])
    tables = {"title": "t", "source": "s", "paper": "p", "reference": "b", "also": [score], "protocol": {"rounds": 5}}
    made = PaperExperiment.model_validate({**tables, "claims": [one.model_dump()]})
    return write_page(made, Results("test", "command", tuple(runs)))


def cell(text: str) -> str:
    """The paired difference of the method m in the table of numbers."""
    row = next(line for line in text.partition("## Numbers")[2].splitlines() if line.startswith("| m |"))
    return row.split("|")[-3].strip()


@pytest.mark.parametrize("reused", [0.0, 0.25])
def test_a_difference_has_the_interval_of_the_verdict(reused):
    text = page("mean", reused, m=(3.0, 5.0, 4.0, 7.0), b=(2.0, 3.0, 3.5, 4.0))
    verdict = next(line for line in text.splitlines() if line.startswith("| **"))
    assert cell(text)
    assert f"b {cell(text)}" in verdict


def test_two_runs_that_never_reach_the_target_are_no_difference_of_zero():
    never = math.inf
    assert cell(page("rounds", m=(3.0, 5.0, 4.0), b=(7.0, 8.0, 9.5)))
    assert cell(page("rounds", m=(3.0, 5.0, never), b=(7.0, 8.0, never))) == ""
