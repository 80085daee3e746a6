"""Comparing: each run in its folder, tuning apart from reporting, failures named, differences paired by seed."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import statistics
from typing import Any

import numpy as np
import pytest

from fedalloy.core.errors import CheckpointError, SpecError
from fedalloy.experiment.recipe import parse
from fedalloy.experiment.records.folder import RunFolder
from fedalloy.experiment.records.reading import name_of
from fedalloy.results.outcome import RunOutcome, read_outcome
from fedalloy.results.statistics import Spread
from fedalloy.results.table import summarise
from fedalloy.studies.compare import jobs
from fedalloy.studies.compare.comparing import compare, select
from fedalloy.studies.compare.jobs import Job, JobNews
from fedalloy.studies.compare.naming import folders, settings_folders

TINY: dict[str, dict[str, Any]] = {
    "task": {"model": "logistic"},
    "partition": {"kind": "iid", "clients": 4},
    "sampling": {"cohort": 2},
    "algorithm": {"lr": 0.5, "batch_size": 128},
    "run": {"rounds": 2, "seeds": [0, 1], "target": 0.4},
}


def tiny(**tables):
    return parse({**TINY, **tables})


def run(name: str, seed: int, mean: float, state: str = "finished", reached: int | None = None) -> RunOutcome:
    return RunOutcome(name, seed, state, round=2, rounds=2, target=0.5, reached=reached, scores={"mean": mean})


def test_the_table_averages_over_seeds_and_pairs_by_seed():
    rows = summarise([
        run("a", 0, 0.5, reached=1), run("a", 1, 0.7), run("b", 1, 0.9, reached=2), run("b", 0, 0.6, reached=4),
    ])  # fmt: skip
    first, second = rows
    assert first.mean is not None
    assert first.mean.mean == pytest.approx(0.6)
    assert first.mean.deviation == pytest.approx(statistics.stdev([0.5, 0.7]))
    assert first.difference is None
    assert second.difference is not None
    assert second.difference.estimate == pytest.approx(0.15)
    assert second.difference.deviation == pytest.approx(statistics.stdev([0.1, 0.2]))
    assert second.difference.outcome == "too few seeds"
    assert first.target_text == "1.0 (1/2)"
    assert summarise([run("a", 0, 0.5)])[0].target_text == "not reached"
    assert summarise([RunOutcome("a", 0, "finished", scores={"mean": 0.5})])[0].target_text == "", "nobody asked"
    assert second.target_text == "3.0 ± 1.4"


def test_a_failed_run_is_named_and_has_no_part_in_the_mean():
    rows = summarise(
        [run("a", 0, 0.5), run("b", 0, 0.1, state="failed"), run("b", 1, 0.9), run("c", 0, 0.2, state="stopped")]
    )
    assert rows[1].mean == Spread(0.9, None, 1)
    assert [one.seed for one in rows[1].failed] == [0]
    assert rows[1].difference is not None
    assert (rows[1].difference.estimate, rows[1].difference.pairs) == (-math.inf, 1), "seed 1 has no partner"
    assert rows[1].trouble == "seed 0 failed in round 2"
    assert rows[2].mean is None
    assert rows[2].trouble == "seed 0 stopped in round 2"


def test_scores_that_are_not_numbers_are_skipped():
    assert Spread.of([math.nan, 0.5]) == Spread(0.5, None, 1)
    assert Spread.of([math.nan]) is None


def test_a_comparison_in_one_process_equals_one_in_two_and_is_reused(tmp_path, caplog, capfd, monkeypatch):
    monkeypatch.setattr(logging.getLogger("fedalloy"), "handlers", [])  # the command line's, if a test before used it
    recipe = select(tiny(algorithm={"lr": 0.5, "batch_size": 512}), ["fedavg", "scaffold"])
    alone = compare(recipe, tmp_path / "alone", processes=1)
    beside = compare(recipe, tmp_path / "beside", processes=2)
    note = "clients with fewer training examples than a batch of 512: 4 of 4 (0, 1, 2 and 1 more)"
    assert caplog.messages == [note, note], "once in each comparison, though eight runs have it"
    assert "fewer training examples" not in capfd.readouterr().err, "processes print nothing themselves"
    assert [row.to_json() for row in alone.rows] == [row.to_json() for row in beside.rows]
    assert all(outcome.finished for outcome in alone.outcomes)
    for outcome in alone.outcomes:
        assert outcome.folder is not None
        twin = tmp_path / "beside" / outcome.folder.relative_to(tmp_path / "alone")
        assert (twin / "rounds.jsonl").read_bytes() == (outcome.folder / "rounds.jsonl").read_bytes()
    news: list[JobNews] = []
    compare(recipe, tmp_path / "alone", watcher=news.append)
    assert [one.kind for one in news] == ["reused"] * 4
    with pytest.raises(CheckpointError, match=r"sampling\.cohort is 2 there, 3 here"):
        compare(recipe.model_copy(update={"sampling": tiny(sampling={"cohort": 3}).sampling}), tmp_path / "alone")
    with pytest.raises(CheckpointError, match="longer but not shorter"):
        compare(recipe.model_copy(update={"run": tiny(run={**TINY["run"], "rounds": 1}).run}), tmp_path / "alone")


def test_a_comparison_may_gain_rounds_seeds_and_entries(tmp_path):
    def made(folder, rounds, seeds, names):
        recipe = tiny(
            run={"rounds": rounds, "seeds": seeds}, evaluate={"every": 4}, compare=[{"name": n} for n in names]
        )
        return compare(recipe, tmp_path / folder, processes=1)

    made("grown", 2, [0], ["fedavg"])
    grown, whole = made("grown", 3, [0, 1], ["fedavg", "fedprox"]), made("whole", 3, [0, 1], ["fedavg", "fedprox"])
    assert [row.to_json() for row in grown.rows] == [row.to_json() for row in whole.rows]
    for one in whole.outcomes:
        assert one.folder is not None
        twin = tmp_path / "grown" / one.folder.relative_to(tmp_path / "whole")
        for name in ("rounds.jsonl", "clients.jsonl", "recipe.toml", "status.json", "identity.json"):
            assert (twin / name).read_bytes() == (one.folder / name).read_bytes()


def test_a_method_that_depends_on_the_length_is_refused_before_anything_runs(tmp_path):
    entries = [{"name": "fedavg"}, {"name": "superfed_mm", "set": {"algorithm.start": 0.5}}]
    compare(tiny(run={"rounds": 1, "seeds": [0]}, compare=entries), tmp_path, processes=1)
    with pytest.raises(CheckpointError, match="the share of the run after which"):
        compare(tiny(run={"rounds": 2, "seeds": [0]}, compare=entries), tmp_path, processes=1)
    assert read_outcome(tmp_path / "fedavg" / "seed-0").round == 1


def test_the_same_algorithm_in_other_words_is_the_same_run(tmp_path):
    one = {"rounds": 1, "seeds": [0]}
    compare(tiny(run=one, compare=[{"name": "a", "set": {"algorithm.name": "fedavg"}}]), tmp_path, processes=1)
    news: list[JobNews] = []
    spelled = {"algorithm.name": "fedavg", "weighting.kind": "samples", "server.kind": "sgd"}
    compare(tiny(run=one, compare=[{"name": "a", "set": spelled}]), tmp_path, processes=1, watcher=news.append)
    assert [one.kind for one in news] == ["reused"]


def test_a_grid_is_tuned_on_its_own_seeds_and_the_best_is_reported(tmp_path):
    grid = {"algorithm.lr": [0.001, 0.5]}
    recipe = tiny(run={"rounds": 2, "seeds": [0], "tuning_seeds": [9]}, grid=grid, compare=[{"name": "fedavg"}])
    done = compare(recipe, tmp_path, processes=1)
    (tuned,) = done.tuned
    assert tuned.best == {"algorithm.lr": 0.5}
    scores = {one.settings["algorithm.lr"]: one.score or math.nan for one in tuned.tried}
    assert scores[0.5] > scores[0.001]
    assert [outcome.seed for outcome in done.outcomes] == [0]
    chosen = read_outcome(tmp_path / "fedavg" / "seed-0")
    assert chosen.scores == done.outcomes[0].scores
    assert json.loads((tmp_path / "tuning.json").read_text())[0]["best"] == {"algorithm.lr": 0.5}
    assert "lr = 0.5" in (tmp_path / "fedavg" / "seed-0" / "recipe.toml").read_text()
    assert sorted(path.name for path in tmp_path.glob("tuning/fedavg/*/*")) == ["seed-9", "seed-9"]


def test_an_entry_may_tune_what_only_it_has(tmp_path):
    entries = [{"name": "fedavg"}, {"name": "fedprox", "grid": {"algorithm.mu": [0.0, 0.1]}}]
    done = compare(tiny(run={"rounds": 1, "seeds": [0], "tuning_seeds": [9]}, compare=entries), tmp_path, processes=1)
    assert [tuned.name for tuned in done.tuned] == ["fedprox"]


@pytest.mark.parametrize(
    ("settings", "grid", "said"),
    [
        ({"seeds": [0, 1], "tuning_seeds": [1, 2]}, {}, "both have 1"),
        ({"seeds": [0, 0]}, {}, "names a seed twice"),
        ({"seeds": [0]}, {"algorithm.lr": [0.1]}, "run.tuning_seeds"),
    ],
)
def test_seeds_that_would_flatter_are_refused(tmp_path, settings, grid, said):
    with pytest.raises(SpecError, match=said):
        compare(tiny(run=settings, grid=grid), tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_bad_entry_is_told_before_any_run_starts(tmp_path):
    entries = [{"name": "fedavg"}, {"name": "wrong", "set": {"algorithm.mu": 1.0}}]
    with pytest.raises(SpecError, match="unknown argument 'mu'"):
        compare(tiny(compare=entries), tmp_path)
    with pytest.raises(SpecError, match="two entries are named 'a'"):
        compare(tiny(compare=[{"name": "a"}, {"name": "a"}]), tmp_path)
    with pytest.raises(SpecError, match="did you mean 'fedavg'"):
        select(tiny(), ["fedavgg"])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["FedAvg", "FedAvg*"], "'FedAvg' and 'FedAvg\\*' would share the folder 'FedAvg'"),
        (["FedAvg", "fedavg"], "would share the folder"),
        (["***", "???"], "would share the folder 'run'"),
        ([".."], "begins with a dot"),
        (["."], "begins with a dot"),
        ([".hidden"], "begins with a dot"),
        (["../../elsewhere"], "begins with a dot"),
        (["tuning"], "reserved name"),
        (["Comparison.json"], "reserved name"),
        (["a", " "], "' ' is no name"),
        (["a", "a."], "would share the folder"),
    ],
)
def test_names_that_would_not_be_a_folder_of_their_own_are_refused_before_anything_runs(tmp_path, names, said):
    inside = tmp_path / "deep" / "inside"
    with pytest.raises(SpecError, match=said):
        compare(tiny(compare=[{"name": name, "set": {"algorithm.name": "fedavg"}} for name in names]), inside)
    assert not list(tmp_path.iterdir())


def test_a_recipe_without_entries_is_not_written_elsewhere_because_of_its_name(tmp_path):
    with pytest.raises(SpecError, match="begins with a dot"):
        compare(parse({**TINY, "name": ".."}), tmp_path / "inside")
    assert not list(tmp_path.iterdir())


def test_names_that_are_too_long_are_cut_and_stay_apart(tmp_path):
    long = ["x" * 300, "x" * 300 + "y"]
    entries = [{"name": name, "set": {"algorithm.name": "fedavg", "algorithm.lr": len(name) / 1e3}} for name in long]
    done = compare(tiny(run={"rounds": 1, "seeds": [0]}, compare=entries), tmp_path, processes=1)
    assert len({outcome.folder for outcome in done.outcomes}) == 2
    assert all(outcome.finished for outcome in done.outcomes)
    assert [row.name for row in done.rows] == long


def test_no_folder_has_a_name_that_windows_cannot_have():
    names = ["CON", "nul.x", "com1", "Fed...", "console", "com10"]
    assert list(folders(names).values()) == ["CON_", "nul.x_", "com1_", "Fed", "console", "com10"]


def test_points_of_a_grid_never_share_a_folder():
    same = settings_folders([{"a": "x*"}, {"a": "x+"}, {"a": "x/"}, {"a": "X"}])
    assert len(set(same)) == 4
    assert same[1] == "a=x+"
    assert len(set(settings_folders([{"a": 0.1}, {"a": "0.1"}]))) == 2
    assert all(len(one.encode()) <= 255 for one in settings_folders([{"a": "\u00e9" * 300}]))
    with pytest.raises(SpecError, match="twice"):
        settings_folders([{"a": 0.1}, {"a": 0.1}])


def test_a_diverged_run_is_a_failed_row_and_the_others_go_on(tmp_path):
    entries = [{"name": "fedavg"}, {"name": "wild", "set": {"algorithm.lr": 1e38}}]
    done = compare(tiny(compare=entries), tmp_path, processes=1)
    calm, wild = done.rows
    assert calm.mean is not None
    assert wild.mean is None
    assert [one.seed for one in wild.failed] == [0, 1]
    assert all(one.reason for one in wild.failed)


def test_runs_are_named_after_what_they_ran():
    assert name_of({"name": "mine", "algorithm": {"name": "fedavg"}}) == "mine"
    assert name_of({"algorithm": {"name": "fedprox"}}) == "fedprox"
    parts = {"solver": {"kind": "sgd"}, "weighting": {"kind": "nova"}, "server": {"kind": "sgd"}}
    assert name_of({"algorithm": parts}) == "sgd, nova, sgd"


# ---------------------------------------------------------------------------------------------- runs that break


def full_at(monkeypatch, *folders):
    """A disk that is full for some runs."""
    whole = RunFolder.checkpoint

    def checkpoint(self, *arguments, **more):
        if "/".join(self.path.parts[-2:]) in folders:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return whole(self, *arguments, **more)

    monkeypatch.setattr(RunFolder, "checkpoint", checkpoint)


def test_an_interrupted_run_does_not_end_a_comparison_and_is_made_the_next_time(tmp_path, monkeypatch):
    recipe = tiny(run={"rounds": 1, "seeds": [0, 1]}, compare=[{"name": "fedavg"}, {"name": "fedprox"}])
    full_at(monkeypatch, "fedavg/seed-0")
    done = compare(recipe, tmp_path, processes=1)
    assert [outcome.state for outcome in done.outcomes] == ["interrupted", "finished", "finished", "finished"]
    assert "No space left" in done.outcomes[0].reason
    assert done.rows[0].coverage == "1 of 2 (1 interrupted)"
    assert done.rows[1].coverage == "2"
    monkeypatch.undo()
    again = compare(recipe, tmp_path, processes=1)
    assert all(outcome.finished for outcome in again.outcomes)
    assert again.rows[0].coverage == "2"


def test_a_choice_waits_until_all_of_its_tuning_is_there(tmp_path, monkeypatch):
    grid = {"algorithm.lr": [0.001, 0.5]}
    run = {"rounds": 1, "seeds": [0], "tuning_seeds": [9]}
    recipe = tiny(run=run, compare=[{"name": "fedavg", "grid": grid}, {"name": "fedprox"}])
    full_at(monkeypatch, "algorithm.lr=0.5/seed-9")
    done = compare(recipe, tmp_path, processes=1)
    assert [outcome.state for outcome in done.outcomes] == ["interrupted", "finished"]
    assert "its tuning is not complete: [Errno 28]" in done.outcomes[0].reason
    monkeypatch.undo()
    assert [tuned.best for tuned in compare(recipe, tmp_path, processes=1).tuned] == [{"algorithm.lr": 0.5}]


def test_an_entry_whose_grid_fails_does_not_end_a_comparison(tmp_path):
    run = {"rounds": 1, "seeds": [0], "tuning_seeds": [9]}
    away = {"algorithm.name": "fedavg", "devices.success": 0.0}
    entries = [{"name": "away", "set": away, "grid": {"algorithm.lr": [0.1, 0.2]}}]
    done = compare(tiny(run=run, compare=[*entries, {"name": "fedavg"}]), tmp_path, processes=1)
    assert [outcome.state for outcome in done.outcomes] == ["failed", "finished"]
    assert "every setting of its grid failed" in done.outcomes[0].reason
    assert done.rows[0].coverage == "0 of 1 (1 failed)"


def test_an_error_in_code_is_told_with_its_traceback_and_the_others_run(tmp_path, monkeypatch):
    recipe = tiny(run={"rounds": 1, "seeds": [0, 1]}, compare=[{"name": "fedavg"}])
    whole = RunFolder.append

    def append(self, *arguments):
        assert self.path.name != "seed-0", "a mistake in somebody's code"
        whole(self, *arguments)

    monkeypatch.setattr(RunFolder, "append", append)
    done = compare(recipe, tmp_path, processes=1)
    assert [outcome.state for outcome in done.outcomes] == ["failed", "finished"]
    assert "AssertionError: a mistake in somebody's code" in done.outcomes[0].reason
    assert "Traceback" in (tmp_path / "fedavg" / "seed-0" / "error.txt").read_text()


def test_a_grid_that_grows_moves_the_runs_of_its_earlier_choice(tmp_path):
    def made(values, folder="grown"):
        run = {"rounds": 1, "seeds": [0], "tuning_seeds": [9]}
        recipe = tiny(run=run, grid={"algorithm.lr": values}, compare=[{"name": "fedavg"}])
        return compare(recipe, tmp_path / folder, processes=1)

    first = made([0.001])
    grown, whole = made([0.001, 0.5]), made([0.001, 0.5], "whole")
    assert [row.to_json() for row in grown.rows] == [row.to_json() for row in whole.rows]
    for name in ("rounds.jsonl", "recipe.toml"):
        mine = (tmp_path / "grown" / "fedavg" / "seed-0" / name).read_bytes()
        assert mine == (tmp_path / "whole" / "fedavg" / "seed-0" / name).read_bytes()
    kept = read_outcome(tmp_path / "grown" / "tuning" / "fedavg" / "algorithm.lr=0.001" / "seed-0")
    assert kept.scores == first.outcomes[0].scores
    assert made([0.001]).outcomes[0].scores == first.outcomes[0].scores, "and back"


def test_a_worker_that_dies_costs_one_run(tmp_path, monkeypatch):
    from tests import dying

    monkeypatch.setattr(jobs, "serve", dying.serve)
    wanted = [Job(name, seed, {}, tmp_path / f"{seed}") for seed, name in enumerate(["dies", "b", "dies", "d", "e"])]
    news: list[JobNews] = []
    jobs.side_by_side(wanted, 2, news.append)
    told = {one.job.seed: (one.kind, one.state) for one in news}
    assert told == {
        0: ("broken", "interrupted"),
        1: ("ended", ""),
        2: ("broken", "interrupted"),
        3: ("ended", ""),
        4: ("ended", ""),
    }


def test_ready_runs_on_data_that_have_changed_since_are_refused(tmp_path):
    data = tmp_path / "data"
    data.mkdir()

    def write(scale: float) -> None:
        for client in range(3):
            x = np.linspace(-scale, scale, 24, dtype=np.float32).reshape(12, 2) + client
            np.savez(data / f"{client}.npz", x=x, y=np.arange(12) % 2)

    def made(seeds: list[int]) -> Any:
        task = {"model": "logistic", "dataset": {"kind": "folder", "path": str(data)}}
        recipe = tiny(task=task, partition={"kind": "natural"}, run={"rounds": 1, "seeds": seeds})
        return compare(recipe, tmp_path / "out", processes=1)

    write(1.0)
    assert len(made([0]).outcomes) == 1
    write(2.0)
    for seeds in ([0, 1], [0]):
        with pytest.raises(CheckpointError, match=r"other data \(the values of task\.train\.x differ"):
            made(seeds)
    write(1.0)
    assert [one.state for one in made([0, 1]).outcomes] == ["finished", "finished"]
    for file in data.iterdir():
        file.unlink()
    assert len(made([0, 1]).outcomes) == 2, "what is ready is shown where the data are not at hand"
