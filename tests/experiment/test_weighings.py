"""Weightings in whole runs: the extra exchange, states that survive a checkpoint, engines that agree."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fedalloy import algorithms, fit
from fedalloy.core.errors import DataError
from fedalloy.engines.batched import Batched
from fedalloy.testing.cases import CHANGING, EngineCase
from fedalloy.testing.engines import check_engine
from fedalloy.testing.problems import SmallTask, small_task

SMALL: dict[str, Any] = {"batch_size": 3, "epochs": 2}
METHODS = {
    "drfedavg": algorithms.drfedavg(**SMALL),
    "drfedavg official": algorithms.drfedavg(official=True, **SMALL),
    "qffl": algorithms.qffl(0.5, **SMALL),
    "qfedavg": algorithms.qfedavg(2.0, "samples", **SMALL),
    "term": algorithms.term(2.0, **SMALL),
    "propfair": algorithms.propfair(**SMALL),
    "propfair official": algorithms.propfair(official=True, **SMALL),
    "fedboosting": algorithms.fedboosting(**SMALL),
    "fedadp": algorithms.fedadp(**SMALL),
    "fedlayerwise": algorithms.fedlayerwise(**SMALL),
    "fedfa": algorithms.fedfa(period=2, **SMALL),
    "fedfa_mo": algorithms.fedfa_mo(**SMALL),
}


@pytest.mark.parametrize("name", METHODS)
def test_engines_agree(name):
    case = EngineCase(name, "the statistics it needs", METHODS[name], small_task(), CHANGING)
    assert check_engine(Batched(kernel="mapped"), [case]) == []


@pytest.mark.parametrize("name", METHODS)
def test_every_method_runs_and_resumes_to_the_same_model(name, tmp_path):
    task = small_task()
    settings: dict[str, Any] = {"cohort": 3, "engine": "loop", "seed": 4}
    straight = fit(METHODS[name], task, rounds=4, **settings)
    fit(METHODS[name], task, rounds=2, folder=tmp_path / "run", **settings)
    resumed = fit(METHODS[name], task, rounds=4, folder=tmp_path / "run", resume=True, **settings)
    assert [row["weights"] for row in resumed.rounds()] == [row["weights"] for row in straight.rounds()]
    for leaf, value in straight.model.items():
        assert torch.equal(resumed.model[leaf], value)


def test_cross_scores_are_recorded_and_change_the_weights():
    rows = list(fit(METHODS["fedboosting"], small_task(), rounds=2, engine="loop").rounds())
    for row in rows:
        assert len(row["info"]["cross_score"]) == 5
        assert sum(row["weights"]) == pytest.approx(1)
        assert len(set(row["weights"])) > 1


def test_a_task_without_validation_parts_is_refused():
    task = small_task()
    bare = SmallTask(task.objective, replace(task.block, size=torch.zeros_like(task.block.size)))
    with pytest.raises(DataError, match="valid_fraction"):
        fit(METHODS["fedboosting"], bare, rounds=1)
