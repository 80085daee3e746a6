"""Looks at a comparison: which count, what each may err by, and what they leave in the folder."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from fedalloy.core.errors import CheckpointError
from fedalloy.results.conclusion import conclusion, notes
from fedalloy.results.looks import FILE, alpha_of, look_at, looks_in, looks_until, read_looks, record_look
from fedalloy.results.outcome import RunOutcome
from fedalloy.results.statistics import ALPHA
from fedalloy.results.table import summarise

FIRST = (0.80, 0.82, 0.79, 0.81, 0.80, 0.83, 0.78, 0.80)
CLEAR = (0.90, 0.91, 0.90, 0.92, 0.74, 0.80, 0.75, 0.80)
"""Clearly better over the first four seeds, and worse afterwards."""


def runs(seeds: int, **more) -> list[RunOutcome]:
    return [
        RunOutcome(name, seed, "finished", rounds=10, scores={"mean": scores[seed]}, **more)
        for name, scores in (("first", FIRST), ("other", CLEAR))
        for seed in range(seeds)
    ]


def test_all_looks_together_err_by_no_more_than_five_percent():
    assert sum(alpha_of(look) for look in range(1, 60)) == pytest.approx(ALPHA)


def test_the_same_seeds_looked_at_again_are_one_look(tmp_path):
    first = record_look(tmp_path, runs(4), read_looks(tmp_path))
    assert record_look(tmp_path, runs(4)[::-1][4:] + runs(4)[4:], first) == first, "in any order"
    assert read_looks(tmp_path) == list(first)
    second = record_look(tmp_path, runs(6), first)
    assert [look.seeds for look in second] == [(0, 1, 2, 3), (0, 1, 2, 3, 4, 5)]
    assert record_look(tmp_path, runs(4), second) == second
    assert looks_until(runs(4), second) == list(first), "the first look stays the first"
    assert read_looks(tmp_path) == looks_in([tmp_path, tmp_path / "elsewhere"]) == list(second)


@pytest.mark.parametrize(
    "changed",
    [
        lambda run: replace(run, state="interrupted") if run.seed == 3 else run,
        lambda run: replace(run, quick=True),
        lambda run: replace(run, state="failed") if run.name == "other" else run,
        lambda run: replace(run, name="first" if run.name == "other" else run.name, seed=run.seed + 9),
    ],
    ids=["interrupted", "quick", "failed", "one algorithm"],
)
def test_what_gives_no_verdict_is_no_look(tmp_path, changed):
    assert record_look(tmp_path, [changed(run) for run in runs(4)], ()) == ()
    assert record_look(tmp_path, runs(2), ()) == (), "too few seeds"
    assert not (tmp_path / FILE).exists()


@pytest.mark.parametrize("more", [{"target": 0.7}, {"metric": "loss"}])
def test_another_question_is_another_look(tmp_path, more):
    looks = record_look(tmp_path, runs(4), ())
    longer = [replace(run, rounds=20) for run in runs(4)]
    assert len(record_look(tmp_path, runs(4, **more), looks)) == len(record_look(tmp_path, longer, looks)) == 2


def test_a_later_look_asks_for_more_and_keeps_what_was_decided():
    looks = [look_at(runs(4)), look_at(runs(8))]
    alone = summarise(runs(8))[1].difference
    later = summarise(runs(8), looks)[1].difference
    assert alone is not None
    assert later is not None
    assert (alone.alpha, later.alpha) == (alpha_of(1), alpha_of(2))
    assert later.high - later.low > alone.high - alone.low
    assert alone.outcome == "undecided"
    assert (later.outcome, later.decided_on, later.word) == ("better", 4, "better (over the first 4 seeds)")
    said = "other (over the first 4 seeds) beats first in accuracy at 95 % over 8 seeds (look 2, at 99.2 %)."
    assert conclusion(runs(8), looks) == said
    assert any("look 2, after seeds 0, 1, 2, 3" in note for note in notes(runs(8), looks))


def test_other_runs_with_the_same_seeds_are_another_look(tmp_path):
    """Such as those of a setting that was tuned again: nobody gets a second chance at the first look's share."""
    looks = record_look(tmp_path, runs(4), ())
    later = [replace(run, scores={"mean": run.scores["mean"] + 0.001 * (run.name == "other")}) for run in runs(4)]
    assert len(record_look(tmp_path, later, looks)) == 2
    found = summarise([*later, *runs(8)[4:8], *runs(8)[12:]], looks)[1].difference
    assert found is not None
    assert (found.outcome, found.alpha) == ("undecided", alpha_of(2)), "what was decided about other runs is void"


def test_entries_added_after_a_look_keep_what_it_decided():
    ups = (0.02, 0.03, 0.05, 0.04)
    fair = [replace(run, scores={"mean": FIRST[run.seed] + ups[run.seed] * (run.name == "other")}) for run in runs(4)]
    added, looks = [*fair, *(replace(run, name="third") for run in fair[4:])], [look_at(fair)]
    found = {row.name: row.difference for row in summarise(added, looks)}
    assert found["third"] is not None
    assert (found["third"].outcome, found["third"].alpha) == ("undecided", alpha_of(2))
    assert found["other"] is not None
    assert found["other"].word == "better (at an earlier look)"
    assert conclusion(added, looks).startswith("other (at an earlier look) beats first")


def test_runs_that_failed_are_no_part_of_a_look():
    """Some leave no folder: the report, which does not see them, must know the look of the comparison."""
    lost = [replace(run, state="failed", rounds=0, scores={}) for run in runs(5)[4:5]]
    assert look_at([*runs(4), *lost]) == look_at(runs(4))


def test_a_folder_of_a_comparison_has_its_looks(tmp_path):
    looks = list(record_look(tmp_path, runs(4), ()))
    (tmp_path / "other" / "seed-0").mkdir(parents=True)
    assert looks_in([tmp_path / "other", tmp_path / "other" / "seed-0"]) == looks


def test_an_earlier_look_against_another_first_decides_nothing():
    other = look_at([run for run in runs(4) if run.name == "other"] + runs(4))
    found = summarise(runs(8), [other])[1].difference
    assert found is not None
    assert (found.outcome, found.alpha) == ("undecided", alpha_of(2))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "Expecting"),
        ("[]", "list indices"),
        ('{"looks": [{"seeds": [0]}]}', "a look has"),
        (
            '{"looks": [{"seeds": ["a"], "entries": ["x"], "rounds": 1, "metric": "m", "target": null, "values": ""}]}',
            "whole numbers",
        ),
        (
            '{"looks": [{"seeds": [], "entries": ["x"], "rounds": true, "metric": "m", "target": null, "values": ""}]}',
            "'rounds'",
        ),
    ],
)
def test_a_damaged_record_is_refused_and_named(tmp_path, text, said):
    (tmp_path / FILE).write_text(text)
    with pytest.raises(CheckpointError, match=f"{FILE} is damaged .*{said}"):
        read_looks(tmp_path)


def test_the_record_is_plain(tmp_path):
    record_look(tmp_path, runs(3, target=0.5), ())
    (look,) = json.loads((tmp_path / FILE).read_text())["looks"]
    assert look == {
        "seeds": [0, 1, 2], "entries": ["first", "other"], "rounds": 10, "metric": "accuracy", "target": 0.5,
        "values": look_at(runs(3, target=0.5)).values,
    }  # fmt: skip
