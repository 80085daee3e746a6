"""What a search leaves behind when it is killed, and that one session at a time goes on with it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import fedalloy
from fedalloy.core.errors import RunLocked
from fedalloy.experiment.recipe.reading import parse
from fedalloy.experiment.recipe.tables import Recipe
from fedalloy.experiment.records.lock import locked
from fedalloy.studies.compare.jobs import Job
from fedalloy.studies.tune.searching import Search
from fedalloy.studies.tune.storage import optuna_library, storage_in
from fedalloy.studies.tune.tuning import searches

pytest.importorskip("optuna")

RECIPE: dict[str, Any] = {
    "task": {"dataset": "digits", "model": {"kind": "logistic"}},
    "partition": {"kind": "dirichlet", "alpha": 0.3, "clients": 5},
    "run": {"rounds": 9, "seeds": [0, 1, 2], "tuning_seeds": [100, 101]},
    "engine": {"kind": "batched"},
}


def test_a_kill_while_settings_are_drawn_changes_no_trial(tmp_path: Path) -> None:
    """The recipe's own settings, which are the first trial, are not lost, and the next ones are drawn the same."""
    whole, cut = (_one_search(tmp_path / name) for name in ("whole", "cut"))
    expected = [whole._ask().settings for _ in range(3)]
    cut.study.ask()  # and killed before anything was drawn
    again = _one_search(tmp_path / "cut")
    assert again._ask().settings == expected[0]
    again.study.ask()
    once_more = _one_search(tmp_path / "cut")
    found = [one.settings for one in once_more.waiting] + [once_more._ask().settings]
    assert found == expected[:2]


def test_another_federation_is_searched_with_other_draws(tmp_path: Path) -> None:
    """The recipe's own settings come first everywhere; after them a method is not unlucky on all federations alike."""
    changes: dict[str, dict[str, Any]] = {
        "same": {"run": {**RECIPE["run"], "rounds": 8}},
        "split": {"partition": {**RECIPE["partition"], "alpha": 0.4}},
        "model": {"task": {**RECIPE["task"], "model": {"kind": "mlp"}}},
    }
    own, *drawn = _drawn(tmp_path / "first", {})
    found = {name: _drawn(tmp_path / name, change) for name, change in changes.items()}
    assert all(one[0] == own for one in found.values())
    assert found["same"][1:] == drawn
    assert len({repr(one[1:]) for one in found.values()}) == 3


def test_a_search_of_an_earlier_version_goes_on_with_its_draws(tmp_path: Path) -> None:
    """Its file does not name the federation."""
    old = _one_search(tmp_path / "old")
    asked = old.study.user_attrs["asked"]
    (tmp_path / "old" / "tuning" / "fedavg" / "search.log").unlink()
    storage = storage_in(tmp_path / "old" / "tuning" / "fedavg")
    study = optuna_library().create_study(storage=storage, study_name="fedavg", direction="maximize")
    study.set_user_attr("asked", asked)
    drawn = [_one_search(tmp_path / "old")._ask().settings for _ in range(2)]
    assert drawn[1] == {"algorithm.server_lr": 0.113, "algorithm.lr": 0.0246}


@pytest.mark.parametrize("noted", [False, True])
def test_a_kill_during_a_comparison_of_trials_does_not_skip_it(tmp_path: Path, noted: bool) -> None:
    """The pruner notes that a trial was compared before it says what comes of it."""
    one = _one_search(tmp_path)
    for lr, score in ((1.0, 0.9), (0.1, 0.2)):
        trial = one._ask()
        if lr == 1.0:
            assert not one._at_rung(trial, score)
            continue
        trial.handle.report(score, one.rungs[0])  # and killed before it was decided
        if noted:
            assert trial.handle.should_prune()  # and killed before it was closed
    again = _one_search(tmp_path)
    assert again._at_rung(again.waiting[1], 0.2) == "stopped early"


def test_a_kill_after_a_comparison_does_not_repeat_it(tmp_path: Path) -> None:
    """A trial that went on is not stopped by better ones that came later."""
    one = _one_search(tmp_path)
    first, second = one._ask(), one._ask()
    assert not one._at_rung(first, 0.2)
    assert not one._at_rung(second, 0.9)
    assert [trial.rung for trial in _one_search(tmp_path).waiting] == [1, 1]


@pytest.mark.skipif(os.name == "nt", reason="links need a privilege there")
def test_a_kill_while_the_journal_is_written_does_not_stop_the_next_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The link by which the library marks its journal as being written would be waited for without end."""
    monkeypatch.chdir(tmp_path)
    _one_search(Path("runs"))
    log = Path("runs") / "tuning" / "fedavg" / "search.log"
    (log.parent / "search.log.lock").symlink_to(log)
    assert _one_search(Path("runs"))._ask().settings


def test_a_second_session_is_refused(tmp_path: Path) -> None:
    asked: dict[str, Any] = {"trials": 1, "rounds": 2, "processes": 1}
    fedalloy.tune(RECIPE, {"fedavg": "fedavg"}, tmp_path, **asked)
    with (
        locked(tmp_path / "tuning" / "fedavg" / "session.lock"),
        pytest.raises(RunLocked, match="another process continues with the search"),
    ):
        fedalloy.tune(RECIPE, {"fedavg": "fedavg"}, tmp_path, **{**asked, "trials": 2})
    assert len(fedalloy.tune(RECIPE, {"fedavg": "fedavg"}, tmp_path, **asked).tuned[0].tried) == 1


def _one_search(folder: Path, changes: Mapping[str, Any] | None = None) -> Search:
    recipe = parse({**RECIPE, **(changes or {}), "tune": {"trials": 9}})
    return searches([("fedavg", recipe)], folder, _job, {})[0]


def _drawn(folder: Path, changes: Mapping[str, Any]) -> list[Any]:
    """The settings of the first three trials."""
    search = _one_search(folder, changes)
    return [search._ask().settings for _ in range(3)]


def _job(recipe: Recipe, name: str, seed: int, folder: Path) -> Job:
    return Job(name, seed, {}, folder / f"seed-{seed}")
