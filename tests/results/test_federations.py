"""Several federations: which folders go together, differences with direction, ranks as published, and the page."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedalloy.cli.app import app
from fedalloy.core.errors import SpecError
from fedalloy.experiment.records.folder import RunFolder
from fedalloy.report.data.federations import forest, rank_line
from fedalloy.report.federations import page
from fedalloy.results.federations import (
    ComparedFederation,
    Federations,
    Ranks,
    _ranks,
    critical_difference,
    read_federations,
)
from fedalloy.results.outcome import RunOutcome
from fedalloy.results.redrawn import Drawn

# Demsar (2006), table 5 (a): critical values of the two-tailed Nemenyi test at 0.05 for 2 to 10 algorithms.
PUBLISHED = (1.960, 2.343, 2.569, 2.728, 2.850, 2.949, 3.031, 3.102, 3.164)


def comparison(
    folder: Path, scores: Mapping[str, Sequence[float]], metric: str = "accuracy", state: str = "finished",
    order: Sequence[str] | None = None, **run: Any,
) -> Path:  # fmt: skip
    """A folder as ``fedalloy compare`` leaves it: a score for every algorithm and seed."""
    for name, values in scores.items():
        for seed, value in enumerate(values):
            recipe = {"name": name, "run": {"rounds": 1, "seeds": [seed], "target_metric": metric, **run}}
            made = RunFolder.create(folder / name / f"seed-{seed}", recipe, {"python": "3"}, {"clients": 2})
            with made.lock():
                row = {"round": 1, "ids": [0], "weights": [1.0], "dropped": {}, "evaluation": {metric: {"mean": value}}}
                made.append("rounds", row)
                made.set_status(state, 1)  # type: ignore[arg-type]
    (folder / "comparison.json").write_text(json.dumps({"order": list(order or scores)}))
    return folder


BETTER = {"first": (0.50, 0.52, 0.51, 0.49), "second": (0.60, 0.63, 0.61, 0.58)}
ALIKE = {"first": (0.50, 0.52, 0.51, 0.49), "second": (0.51, 0.51, 0.50, 0.50)}


@pytest.fixture
def two(tmp_path) -> list[Path]:
    return [comparison(tmp_path / "one", BETTER), comparison(tmp_path / "two", ALIKE)]


def federation(name: str, scores: Mapping[str, Sequence[float]], higher: bool | None = True) -> ComparedFederation:
    groups = {
        algorithm: [RunOutcome(algorithm, seed, "finished", scores={"mean": value}, higher_is_better=higher)
                    for seed, value in enumerate(values)]
        for algorithm, values in scores.items()
    }  # fmt: skip
    return ComparedFederation(name, Path(name), groups)


def together(all_scores: Sequence[Mapping[str, Sequence[float]]], higher: bool | None = True) -> Federations:
    found = tuple(federation(f"f{place}", scores, higher) for place, scores in enumerate(all_scores))
    return Federations(tuple(all_scores[0]), "accuracy", higher, found)


def test_the_critical_difference_is_that_of_the_published_table():
    for size, q in enumerate(PUBLISHED, 2):
        # Rounded to three digits in print; some entries are off by one in the last.
        assert critical_difference(size, 10) == pytest.approx(q * math.sqrt(size * (size + 1) / 60), rel=6e-4)
    assert critical_difference(4, 14) == pytest.approx(1.25, abs=0.005), "the example of the paper"


def test_ranks_by_hand():
    # Without ties: chi2 = 12 N / (k (k + 1)) * (sum R^2 - k (k + 1)^2 / 4), F = (N - 1) chi2 / (N (k - 1) - chi2).
    scores = [[0.9, 0.8, 0.7]] * 7 + [[0.7, 0.8, 0.9]] * 3
    found = _ranks(("a", "b", "c"), scores, True, ())
    assert found.averages == pytest.approx((1.6, 2.0, 2.4))
    chi2 = 12 * 10 / 12 * (1.6**2 + 2.0**2 + 2.4**2 - 12)
    f = 9 * chi2 / (20 - chi2)
    # The F distribution with 2 and 2 m degrees of freedom has the tail (1 + f / m)^-m.
    assert found.p == pytest.approx((1 + f / 9) ** -9)
    assert found.groups == [("a", "b", "c")], "not rejected: nobody is told apart"
    assert _ranks(("a", "b", "c"), scores, False, ()).averages == pytest.approx((2.4, 2.0, 1.6)), (
        "a loss ranks the other way"
    )


def test_ties_share_ranks_and_extremes_do_not_break():
    assert _ranks(("a", "b", "c"), [[0.5, 0.5, 0.1]] * 10, True, ()).averages == (1.5, 1.5, 3.0)
    assert _ranks(("a", "b", "c"), [[0.5, 0.5, 0.5]] * 10, True, ()).p == 1.0
    assert _ranks(("a", "b", "c"), [[0.3, 0.2, 0.1]] * 10, True, ()).p == 0.0
    assert _ranks(("a", "b"), [[0.3, 0.2]] * 10, True, ()).p == pytest.approx(2 / 2**10)
    assert _ranks(("a", "b"), [[0.3, 0.3]] * 10, True, ()).p == 1.0


def test_federations_with_the_same_examples_are_said():
    def held(place: int, examples: str) -> ComparedFederation:
        one = federation(f"f{place}", BETTER)
        groups = {name: [replace(run, drawn=Drawn(run.seed, "", examples, "", 0.0, ())) for run in runs]
                  for name, runs in one.groups.items()}  # fmt: skip
        return replace(one, groups=groups)

    def said(*examples: str) -> str:
        found = Federations(("first", "second"), "accuracy", True, tuple(held(*one) for one in enumerate(examples)))
        return found.conclusion(found.differences())

    assert said("digits", "adult", "digits").endswith(
        "But 2 of the federations hold the same examples, so their answers are not independent."
    )
    assert "same examples" not in said("digits", "adult")
    assert "same examples" not in said("", ""), "nothing is recorded"


def test_runs_that_end_at_the_target_have_no_scores_to_compare(two, tmp_path):
    ending = comparison(tmp_path / "ending", BETTER, target=0.4, stop_at_target=True)
    with pytest.raises(SpecError, match=r"end when they reach their target \(run\.stop_at_target\)"):
        read_federations([two[0], ending])


def test_bars_join_what_is_not_told_apart():
    ranks = Ranks(("a", "b", "c", "d"), (3.6, 1.0, 2.1, 2.9), 1.3, 0.001, 30, ())
    assert ranks.groups == [("b", "c"), ("c", "d"), ("d", "a")]
    assert ranks.against("c") == "Over 30 federations together, a ranks worse (3.60) than c (2.10) at 95 %."
    assert Ranks(("a", "b"), (1.0, 2.0), 0.5, 0.001, 30, ()).groups == []
    assert "no algorithm ranks better or worse" in Ranks(("a", "b"), (1.0, 2.0), 0.5, 0.2, 30, ()).against("a")


@pytest.mark.parametrize(("higher", "outcome"), [(True, "better"), (False, "worse"), (None, "higher")])
def test_verdicts_follow_the_direction(higher, outcome):
    both = together([BETTER, ALIKE], higher)
    found = both.differences()
    assert found["f0", "second"].outcome == outcome
    assert found["f0", "second"].estimate == pytest.approx(0.1)
    assert found["f0", "second"].family == 2, "all differences on the page are one family"
    said = f"second against first in accuracy at 95 %: {outcome} on 1 of 2 federations, undecided on 1."
    assert both.conclusion(found) == said


def test_ranks_need_ten_federations():
    some = {"first": (0.5, 0.5, 0.5), "second": (0.6, 0.7, 0.6), "third": (0.4, 0.3, 0.4)}
    assert together([some] * 9).ranks() is None
    assert "here are 9, so 1 more is missing" in page_text(together([some] * 9))
    ten = together([some] * 10)
    found = ten.ranks()
    assert found is not None
    assert found.averages == (2.0, 1.0, 3.0)
    assert ten.conclusion(ten.differences()).endswith("no algorithm ranks better or worse than first at 95 %.")
    assert together([some] * 10, higher=None).ranks() is None
    # A federation in which an algorithm failed everywhere does not count, and is named.
    broken = {**some, "third": (math.nan,) * 3}
    assert together([some] * 9 + [broken]).ranks() is None
    left = together([some] * 10 + [broken]).ranks()
    assert left is not None
    assert left.left_out == ("f10",)


def page_text(federations: Federations) -> str:
    from fedalloy.report.federations import _why_no_ranks

    return _why_no_ranks(federations)


def test_scores_use_the_seeds_that_all_have():
    one = federation("f", {"first": (0.5, 0.9), "second": (0.6, math.nan)})
    assert one.seeds == [0]
    assert one.scores == [0.5, 0.6]


def test_folders_with_common_algorithms_are_federations(two):
    found = read_federations(two)
    assert found is not None
    assert [one.name for one in found.all] == ["one", "two"]
    assert (found.names, found.metric, found.higher_is_better) == (("first", "second"), "accuracy", True)
    assert found.differences()["one", "second"].outcome == "better"


def test_one_folder_plain_runs_and_other_algorithms_are_shown_as_before(two, tmp_path):
    assert read_federations(two[:1]) is None
    assert read_federations([two[0] / "first", two[0] / "second"]) is None
    assert read_federations([two[0], comparison(tmp_path / "other", {"third": (0.5,), "fourth": (0.6,)})]) is None


def test_algorithms_that_some_lack_are_left_out_and_named(two, tmp_path):
    third = comparison(tmp_path / "three", {**BETTER, "second": (0.7,) * 4, "extra": (0.1,) * 4})
    found = read_federations([*two, third])
    assert found is not None
    assert (found.names, found.left_out) == (("first", "second"), ("extra",))
    assert "left out: extra" in page(found)


def test_what_cannot_be_compared_is_refused(two, tmp_path):
    with pytest.raises(SpecError, match="is named twice"):
        read_federations([two[0], two[1], two[0] / ".." / "one"])
    other = comparison(tmp_path / "other", dict(reversed(BETTER.items())))
    with pytest.raises(SpecError, match=r"compares with 'second' and .*one with 'first'"):
        read_federations([two[0], other])
    with pytest.raises(SpecError, match="only 'first' in common"):
        read_federations([two[0], comparison(tmp_path / "lone", {"first": (0.5,), "third": (0.6,)})])
    with pytest.raises(SpecError, match=r"'loss' \(lower is better\), one by 'accuracy' \(higher is better\)"):
        read_federations([two[0], comparison(tmp_path / "loss", BETTER, "loss")])
    shutil.copytree(two[0], tmp_path / "copy")
    with pytest.raises(SpecError, match="copy and one hold the same runs"):
        read_federations([two[0], tmp_path / "copy"])
    empty = comparison(tmp_path / "begun", {"first": (0.5,)}, order=["first", "second"])
    with pytest.raises(SpecError, match="has no run of 'second' yet"):
        read_federations([two[0], empty])


@pytest.mark.parametrize("state", ["stopped", "failed"])
def test_open_runs_give_no_verdict_and_failed_ones_do_not_count(two, tmp_path, state):
    found = read_federations(
        [two[0], comparison(tmp_path / "late", dict.fromkeys(BETTER, (0.5, 0.6, 0.7)), state=state)]
    )
    assert found is not None
    evidence = found.differences()
    if state == "stopped":
        assert found.conclusion(evidence) == "No verdict yet: 6 of 14 runs did not finish."
        assert {one.outcome for one in evidence.values()} == {"not finished"}
        assert found.ranks() is None
    else:
        assert ("late", "second") not in evidence
        assert found.conclusion(evidence).endswith("worse than any result: 3 runs of first, 3 runs of second.")
        assert "no common seed" in page(found)


def test_shortened_runs_and_few_seeds_give_no_verdict(two, tmp_path):
    short = [
        comparison(tmp_path / name, {**BETTER, "first": (base,) * 4}, quick=True)
        for name, base in (("a", 0.1), ("b", 0.2))
    ]
    found = read_federations(short)
    assert found is not None
    assert found.names == ("first", "second")
    assert found.conclusion(found.differences()) == "No verdict: the runs were shortened (--quick)."
    few = together([{name: values[:2] for name, values in BETTER.items()}] * 2)
    assert (
        few.conclusion(few.differences()) == "No verdict: no federation has 3 seeds of first and of another algorithm."
    )


def test_the_picture_has_what_the_evidence_says():
    both = together([BETTER, {"first": (0.5,), "second": (0.7,)}])
    found = both.differences()
    chart = forest(both, found)
    assert chart is not None
    one, other = (row["points"][0] for row in chart["rows"])
    assert (one["value"], one["decided"], one["outcome"]) == (pytest.approx(0.1), True, "better")
    assert one["low"] == pytest.approx(found["f0", "second"].low, rel=1e-4)
    assert (other["low"], other["high"], other["decided"]) == (None, None, False)
    assert "right of zero are better" in chart["note"]
    assert "left of zero are better" in forest_note(False)
    assert "zero are better" not in forest_note(None)
    line = rank_line(Ranks(("a", "b"), (2.0, 1.0), 0.62, 0.002, 10, ()))
    assert [point["name"] for point in line["points"]] == ["b", "a"]


def forest_note(higher: bool | None) -> str:
    chart = forest(together([BETTER], higher), together([BETTER], higher).differences())
    assert chart is not None
    return str(chart["note"])


def test_the_command_writes_a_page_of_two_folders(two, tmp_path):
    done = CliRunner().invoke(app, ["report", *map(str, two), "-o", str(tmp_path / "page.html")])
    assert done.exit_code == 0, done.output
    assert "16 runs" in done.output
    text = (tmp_path / "page.html").read_text()
    assert "<h1>2 algorithms on 2 federations</h1>" in text
    assert "better on 1 of 2 federations, undecided on 1." in text
    assert re.search(r'<td class="up"[^>]*>\+0\.100 \[[^\]]*\]: better<', text)
    assert "here are 2, so 8 more are missing" in text
    twice = CliRunner().invoke(app, ["report", str(two[0]), str(two[0])])
    assert twice.exit_code != 0
    assert "named twice" in twice.output + str(twice.exception)
