"""The page of the methods side by side: made from its data alone, and in the right direction."""

import json
import math
import tomllib

import pytest

import fedalloy
from benchmarks.side_by_side import page
from benchmarks.side_by_side.advised import Answer, answers, gather, regrets
from benchmarks.side_by_side.gathering import gather as packed
from benchmarks.side_by_side.longer import against_longer, rows
from benchmarks.side_by_side.searched import own_settings
from benchmarks.side_by_side.stored import PERSONAL, Entry, Federation
from fedalloy.studies.tune.searching import rungs

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


def test_searches_that_kept_the_recipes_settings_are_told_from_others(tmp_path):
    recipe = "[algorithm]\nlr = 0.1\n[run]\nrounds = 60\ntuning_seeds = [100, 101]\n[evaluate]\nevery = 15\n"
    (tmp_path / "made.toml").write_text(recipe)
    own = own_settings(tmp_path / "made.toml")
    found = {"kept": ({"algorithm.lr": 0.1, "algorithm.server_lr": 1.0}, 225), "alone": ({"algorithm.lr": 0.1}, 240),
             "other": ({"algorithm.lr": 0.1, "algorithm.server_lr": 0.5}, 225)}  # fmt: skip
    entries = {name: Entry(name, settings, 8, rounds, []) for name, (settings, rounds) in found.items()}
    assert {name: own.are(one) for name, one in entries.items()} == {"kept": True, "alone": True, "other": False}
    # One trial of 60 rounds on two seeds, and seven that were compared after 15: one more round, and another went on.
    assert [own.alone(entries[name], 60) for name in ("kept", "alone")] == [True, False]


def test_a_larger_search_for_fedavg_takes_its_place(tmp_path):
    made = federation(True, entry("fedavg", 0.0), entry("ahead", 0.05), entry("behind", 0.02))
    longer = vars(entry("fedavg", 0.03))
    packed = {"federation": "made", "entries": [longer]}
    packed |= {name: getattr(made, name) for name in ("description", "metric", "higher_is_better", "rounds", "clients")}
    (tmp_path / "made.json").write_text(json.dumps({**packed, "reused": 0.0, "torch": ""}))
    ((name, before, after, _, better, worse),) = rows(against_longer([made], tmp_path))
    assert (name, before[:5], after[:5], better, worse) == ("made", "0.590", "0.620", "ahead +2.0", "behind -1.0")
    assert against_longer([made], tmp_path / "nowhere") == []
    longer["runs"].pop()
    (tmp_path / "made.json").write_text(json.dumps({**packed, "reused": 0.0, "torch": ""}))
    with pytest.raises(ValueError, match="not those of the page"):
        against_longer([made], tmp_path)


def answer(method: str) -> Answer:
    return Answer("made", "fedalloy advise", method, "Use it.", 20, 4, ("fedavg: trials 1",))


def test_the_regret_of_an_advice_is_that_of_its_method_in_the_table():
    made = federation(True, entry("fedavg", 0.0), entry("fedavg fine-tuned", 0.02), entry("best", 0.05))
    rows = {row[0]: row[1:] for row in regrets([answer("fedavg_ft")], [made])}
    assert rows["`fedalloy advise`"] == rows["always fedavg fine-tuned, tuned"] == ["3.0 (rank 2 of 3)", "3.0"]
    assert rows["always fedavg, tuned"] == ["5.0 (rank 3 of 3)", "5.0"]
    assert rows["a method drawn at random"][1] == "2.7"
    other = {row[0]: row[1:] for row in regrets([answer("fedadam")], [made])}
    assert other["`fedalloy advise`"] == ["fedadam: not compared here", "-"]


def test_an_answer_is_kept_with_its_question(tmp_path):
    asked = {
        "minutes": 3.0,
        "most": 6,
        "without": ["made"],
        "recipe": {"run": {"seeds": [20, 21], "tuning_seeds": [200]}},
    }
    record = {"asked": asked, "rounds": 9, "report": {"seeds": [0, 1, 2, 3]},
              "stages": [{"methods": ["fedavg", "ditto"], "trials": 2}]}  # fmt: skip
    (tmp_path / "made").mkdir()
    told = {"method": "ditto", "first": "Use ditto.", "pilot": record}
    (tmp_path / "made" / "advice.json").write_text(json.dumps(told))
    gather(tmp_path / "made", tmp_path / "kept")
    (kept,) = answers(tmp_path / "kept")
    assert (
        "recipes/side-by-side/made.toml --set run.seeds=[20,21] --set run.tuning_seeds=[200] --minutes 3 "
        in kept.command
    )
    assert (kept.entry, kept.seeds, kept.stages) == ("ditto", 4, ("fedavg, ditto: trials 2",))


def test_a_comparison_that_is_not_complete_is_left_out(tmp_path):
    recipe = {"task": {"dataset": "digits", "model": "logistic"}, "partition": {"clients": 3}, "run": {"rounds": 1}}
    place = tmp_path / "made"
    fedalloy.compare({**recipe, "compare": [{"name": "fedavg"}]}, place, seeds=[0, 1], processes=1)
    (place / "tuning.json").write_text("[]")
    for order, left_out in ((["fedavg", "ditto"], True), (["fedavg"], False)):
        (place / "comparison.json").write_text(json.dumps({"order": order}))
        assert ("not complete (1 of 2 methods), left out" in packed(place, tmp_path / "kept")) is left_out
        assert (tmp_path / "kept" / "made.json").exists() is not left_out


def test_the_page_is_what_the_data_give():
    assert page.check() == 0


def test_every_federation_has_enough_methods_of_both_kinds():
    recipes = sorted(page.RECIPES.glob("*.toml"))
    assert len(recipes) == 6
    for file in recipes:
        names = {one["name"] for one in tomllib.loads(file.read_text(encoding="utf-8"))["compare"]}
        assert len(names & set(PERSONAL)) >= 8
        assert len(names - set(PERSONAL)) >= 12


def test_the_search_of_every_recipe_can_stop_trials_early():
    """The page says that it could; where scores come too rarely, every trial runs to its end."""
    for file in page.RECIPES.glob("*.toml"):
        recipe = tomllib.loads(file.read_text(encoding="utf-8"))
        assert rungs(recipe["run"]["rounds"], recipe["evaluate"]["every"]), file.name
