"""Verdicts and intervals where the truth is known: a small version of ``python -m benchmarks.evidence``.

Every check is seen to fail with a fault: looks that all have the whole 5 %, a family that is not corrected, "one round
more than it ran" for a target that was never reached, and splits that are taken for independent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import pytest

from benchmarks.evidence import measuring, page
from benchmarks.evidence.__main__ import main
from benchmarks.evidence.measuring import Figures, measure, wrong
from benchmarks.evidence.worlds import World, recorded_cases
from fedalloy.results import against_first, looks
from fedalloy.results.evidence import Evidence, PairedDifferences, compare_together
from fedalloy.results.rounds import Span
from fedalloy.results.statistics import ALPHA

REPETITIONS = 1000
Patch = Callable[[pytest.MonkeyPatch], None]


def looking_naively(patch: pytest.MonkeyPatch) -> None:
    for module in (looks, against_first, measuring):
        patch.setattr(module, "alpha_of", lambda look: ALPHA)


def one_by_one(patch: pytest.MonkeyPatch) -> None:
    def alone(asked: list[PairedDifferences], alpha: float) -> list[Evidence]:
        return [compare_together([one], alpha)[0] for one in asked]

    patch.setattr(against_first, "compare_together", alone)


def one_round_more(patch: pytest.MonkeyPatch) -> None:
    def filled(mine: Mapping[int, Span], theirs: Mapping[int, Span], reused: float = 0.0) -> PairedDifferences:
        return PairedDifferences(tuple(mine[seed][0] - theirs[seed][0] for seed in mine), False, reused)

    patch.setattr(against_first, "rounds_apart", filled)


def splits_as_if_independent(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(against_first, "redrawn", lambda drawn: None)


@pytest.mark.parametrize(
    ("world", "fault"),
    [
        (World("looks twice", "normal", 4, looks=2), looking_naively),
        (World("family", "recorded", 5, (0.0,) * 4), one_by_one),
        (World("censored", "recorded", 16, (1.0,), horizon=20), one_round_more),
        (World("splits", "normal", 5, shared=0.25), splits_as_if_independent),
    ],
    ids=lambda one: one.name if isinstance(one, World) else one.__name__,
)
def test_the_bounds_are_kept_and_a_fault_is_seen(world, fault, monkeypatch):
    assert wrong(world, measure(world, REPETITIONS), REPETITIONS) == []
    fault(monkeypatch)
    assert wrong(world, measure(world, REPETITIONS), REPETITIONS) != []


def test_recorded_differences_are_centred_and_many():
    cases = recorded_cases()
    assert sum(map(len, cases)) > 200
    assert all(abs(case.mean(axis=1)).max() < 1e-9 for case in cases)


def test_the_page_shows_the_stored_figures_and_these_keep_the_bounds(monkeypatch, tmp_path, capsys):
    assert main(["--check"]) == 0
    changed = tmp_path / "report.md"
    changed.write_text(page.PAGE.read_text().replace("looks twice, equal | normal", "looks twice, equal | usual"))
    monkeypatch.setattr(page, "PAGE", changed)
    assert main(["--check"]) == 1
    assert "differs from" in capsys.readouterr().err


def test_a_missed_bound_is_said():
    single, several = World("one", "normal", 5), World("several", "normal", 5, (0.0, 0.0))
    assert wrong(single, Figures(0.07, 0.98, 0.0)) == ["7.0% false verdicts, at most 6.5%", "98.0% covered, 93% to 97%"]
    assert wrong(several, Figures(0.01, 0.98, 0.0)) == []
    assert wrong(several, Figures(math.nan, 0.93, 0.0)) == ["93.0% covered, 94% to 100%"]
