"""The page of the methods side by side: made from its data alone, and in the right direction."""

import math
import tomllib

import pytest

from benchmarks.side_by_side import page
from benchmarks.side_by_side.stored import PERSONAL, Entry, Federation

SEEDS = range(10)


def entry(name: str, ahead: float, broken: bool = False) -> Entry:
    """A method whose mean is ahead of a base that differs by seed, give or take a little."""
    runs = []
    for seed in SEEDS:
        score = 0.5 + 0.02 * seed + ahead * (1 + 0.01 * (seed % 3))
        scores = {"mean": score, "worst_served": score - 0.2, "gini": 0.1}
        curve = {"10": score - 0.1, "20": score}
        runs.append({"seed": seed, "state": "finished", "scores": scores, "curve": curve, "bytes": 10, "clients": []})
    if broken:
        runs[0] = {"seed": 0, "state": "failed", "reason": "diverged", "round": 3}
    return Entry(name, {}, 8, 100, runs)


def federation(higher_is_better: bool, *entries: Entry) -> Federation:
    return Federation("made", "", "score", higher_is_better, 20, 4, 0.0, "", entries)


@pytest.mark.parametrize(("higher", "outcome", "best"), [(True, "better", "ahead"), (False, "worse", "behind")])
def test_the_direction_of_the_metric_decides_who_is_better(higher, outcome, best):
    made = federation(higher, entry("fedavg", 0.0), entry("ahead", 0.05), entry("behind", -0.05))
    assert made.against_fedavg["ahead"]["mean"].outcome == outcome
    assert made.rank(best) == 1
    assert made.regret(best) == 0
    assert made.regret("fedavg") == pytest.approx(5, abs=0.1)


def test_a_method_that_failed_on_a_seed_is_worse_than_all():
    made = federation(True, entry("fedavg", 0.0), entry("lucky", 0.05, broken=True))
    assert made.rank("lucky") == 2
    assert made.regret("lucky") == math.inf
    assert made.against_fedavg["lucky"]["mean"].ranked


def test_rounds_are_counted_to_the_level_that_fedavg_ends_with():
    made = federation(True, entry("fedavg", 0.0), entry("fast", 0.15), entry("never", -0.05))
    assert [made.rounds_to_fedavg(one)[0] for one in made.entries[:2]] == [20, 10]
    assert made.rounds_to_fedavg(made.entries[2])[1] == 0


def test_the_page_is_what_the_data_give():
    assert page.check() == 0


def test_every_federation_has_enough_methods_of_both_kinds():
    recipes = sorted((page.ROOT / "recipes" / "side-by-side").glob("*.toml"))
    assert len(recipes) == 6
    for file in recipes:
        names = {one["name"] for one in tomllib.loads(file.read_text(encoding="utf-8"))["compare"]}
        assert len(names & set(PERSONAL)) >= 8
        assert len(names - set(PERSONAL)) >= 12
